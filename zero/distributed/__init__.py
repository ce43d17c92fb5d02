"""Other ranks: the only room that talks to them, and the error when one fails."""
