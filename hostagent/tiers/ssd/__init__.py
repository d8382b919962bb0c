"""The SSD tier: blocks in preallocated files that outlive the agent."""
