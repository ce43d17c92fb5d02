"""Other libraries' training loops on this library's engine, one file for each library."""
