"""The model as transformers knows it; needed only to hand a model over. export.py tells the story.

mapping    the weights under the names of a stock class, and back
card       the model card
parity     an export is published only if transformers computes our numbers with it
modeling_nano2049   the model for transformers, where no stock class computes it
"""
