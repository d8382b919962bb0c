"""The `kvcast` command and what all its daemons share (flags, configuration, logs)."""
