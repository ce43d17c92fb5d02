"""Other ranks: the only room that talks to them, and what is said when one fails."""
