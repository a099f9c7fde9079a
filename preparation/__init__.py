"""Text from anywhere becomes rows on disk. You need not read it to understand training.

docs/house.md says what each file is for."""
