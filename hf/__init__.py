"""The model as transformers knows it; needed only to hand a model over, or to take over another's.

mapping          the weights under the names of a stock class, and back
card             the model card
parity           an export is published only if transformers computes our numbers with it
imported         a stock model as ours, exactly or not at all
tokenizer_json   another's tokenizer.json as ours, with the same ids
modeling_nano2049  the model for transformers, where no stock class computes it
"""
