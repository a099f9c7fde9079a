"""Exams: multiple choice, CORE, and a tournament of checkpoints."""
