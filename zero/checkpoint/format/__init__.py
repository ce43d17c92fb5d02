"""The format of a checkpoint, as values and texts: lists of tensors and files, hashes, JSON. Opens no file."""
