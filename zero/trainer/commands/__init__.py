"""Commands for a finished run: its report, a sample of text, and checkpoints of other libraries."""

COMMANDS = {"report": "report", "sample": "sample", "export": "export_checkpoint", "import": "import_checkpoint"}
"""First word of a command line to the file of its command."""
