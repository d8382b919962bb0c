"""The engines against each other, on random programs, frames and table writes."""
