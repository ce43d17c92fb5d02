"""What is done with a finished run: its report, a sample of text, and checkpoints of other libraries."""

COMMANDS = {"report": "report", "sample": "sample", "export": "export_checkpoint", "import": "import_checkpoint"}
"""First words of a command line, and the files of this folder that know the rest."""
