"""Communication with other ranks, and errors that name a failed rank. No other room communicates."""
