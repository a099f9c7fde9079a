"""The model as other programs know it; needed only to export a model, or to import another's.

export           the folder: weights, configuration, tokenizer, card
mapping          the weights under the names of a stock class, and back
parity           an export is published only if transformers computes our numbers with it
llama_cpp        the model as a file for llama.cpp, which must compute our numbers with it
card             the model card
imported         a stock model as ours, exactly or not at all
tokenizer_json, template  another's tokenizer.json as ours; our conversations for transformers
modeling_nano2049  the model for transformers, where no stock class computes it
"""
