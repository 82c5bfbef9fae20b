"""The `dtq` command: one file a noun."""
