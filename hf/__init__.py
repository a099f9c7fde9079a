"""The model as transformers knows it. export.py tells the story; you need it to hand a model over.

mapping    the same numbers under the names of a stock class, and back
parity     an export is published only if transformers computes our numbers with it
modeling_nano2049   the model for transformers, where no stock class computes it
"""
