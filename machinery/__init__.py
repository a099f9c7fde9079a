"""What makes a run robust and repeatable. You need not read it to understand training.

docs/house.md says what each file is for."""
