"""The memory that holds an agent's blocks: the arena, what says what lies there, and the disks."""
