"""The reference engine: a plain interpreter that reads like the specification."""
