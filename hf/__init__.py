"""The model as other programs know it; needed only to export a model, or to import another's.

docs/house.md says what each file is for."""
