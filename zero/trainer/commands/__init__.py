"""Commands for a finished run: its report, a sample of text, and checkpoints of other libraries."""

COMMANDS = {"report": "report", "sample": "sample", "export": "export_checkpoint", "import": "import_checkpoint"}
"""The module of each command, by the first word of the command line."""
