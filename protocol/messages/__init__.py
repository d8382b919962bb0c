"""The messages that kvcast's parts exchange: their types, and their form as bytes."""
