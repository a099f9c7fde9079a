"""What the sources printed: their tables, which the lessons recompute.

Figures only, as literals; each table names its place. A document is known by its title:
- "Pré-Treino Eficiente de Modelos de Linguagem": a thesis, ten weeks of pretraining (Portuguese)
- "nanobot pre-train": a note on a training script (Chinese)
- "NfNN": a monograph on an autodiff library and its parameter server (Portuguese)
- "Armazenamento": an article on storage for training at scale (Portuguese)
- "擴展的驚喜": four riddles of a large run, from the Smol Training Playbook (Chinese)
"""

# NfNN, "4.5 Resultados", table 4.1: setting, method, workers, seconds for 5,000 updates, half of
# the 95% interval, accuracy in %
TABLE_4_1 = [
    ("Desktop", "Sync", 1, 12, 1, 83.686157),
    ("Desktop", "Sync", 2, 238, 5, 87.105171),
    ("Desktop", "Sync", 3, 260, 10, 88.499664),
    ("Desktop", "Async", 1, 30, 5, 83.686157),
    ("Desktop", "Async", 2, 10, 5, 83.392136),
    ("Desktop", "Async", 3, 9, 2, 83.274529),
    ("Datacenter", "Sync", 1, 230, 9, 83.686157),
    ("Datacenter", "Sync", 2, 235, 10, 87.105171),
    ("Datacenter", "Sync", 3, 232, 12, 88.508064),
    ("Datacenter", "Async", 1, 229, 5, 83.686157),
    ("Datacenter", "Async", 2, 114, 5, 83.610550),
    ("Datacenter", "Async", 3, 74, 6, 83.795364),
]

# Thesis, week 7, "Experimentos Realizados", table 7.1: framework, parameters without embeddings,
# GPU, GPUs, TFLOP/s of one GPU, info, tokens/s of all, MFU in % (None: not printed)
TABLE_7_1 = [
    ("Megatron-LM", "89M", "H100", 1, 215.5, "BF16 - Flash attention 3", 273_384, 21.73),
    ("Megatron-LM", "89M", "H100", 2, 212.9, "BF16 - Flash attention 3", 497_102, 22.14),
    ("Megatron-LM", "89M", "H100", 2, 222.7, "FP8 - Flash attention 3", 502_810, None),
    ("Megatron-LM", "89M", "H100", 2, 183.2, "BF16 - Fused attention", 427_850, 18.52),
    ("Megatron-LM", "1.7B", "H100", 2, 431.5, "BF16 - Flash attention 3", 89_074, 43.62),
    ("Megatron-LM", "1.7B", "H100", 2, 444.2, "BF16 - Fused attention", 93_071, 44.89),
    ("Transformers", "120M", "H100", 1, 35.8, "BF16 - SDPA", 52_022, 3.6),
    ("Megatron-LM", "89M", "B200", 2, 282.9, "BF16", 720_317, 12.7),
]

# Thesis, week 7, "Experimentos Realizados", table 7.2, 8 x B200: parameters without embeddings
# (billions), sequences in a step, tokens in a step, tokens/s of all, TFLOP/s of one GPU, MFU in %,
# days for 100B tokens
TABLE_7_2 = [
    (2.5, 128, 524_288, 325_948.3, 722, 32.09, 3.55),
    (5.4, 16, 65_536, 166_293.24, 745, 33.11, 6.96),
    (5.4, 32, 131_072, 180_302.27, 800, 35.56, 6.42),
    (18.9, 16, 65_536, 51_543.35, 773, 34.36, 22.46),
    (18.9, 16, 65_536, 41_784.79, 630, 28.0, 27.7),
    (25.6, 10, 40_960, 26_075.13, 538, 23.91, 44.39),
    (25.6, 16, 65_536, 29_292.22, 539, 23.96, 39.51),
    (58, 10, 40_960, 6_461.26, 543, 24.13, 179.13),
]

# Thesis, week 9, "Avaliação dos Checkpoints", table 9.1: step of the checkpoint -> Elo points, in
# the order printed
TABLE_9_1 = {
    24000: 1059.90, 20000: 1058.29, 10500: 1057.78, 13000: 1056.88, 10000: 1050.70, 14000: 1046.44,
    18000: 1043.90, 13500: 1031.83, 19000: 1039.23, 19500: 1034.80, 16000: 1033.17, 17500: 1032.32,
    23000: 1031.83, 22500: 1031.29, 15500: 1030.61, 16500: 1026.50, 15000: 1024.23, 22000: 1016.67,
    8500: 1010.24, 21000: 1003.03, 12000: 1001.49, 14500: 1000.05, 17000: 1000.00, 6500: 999.33,
    9500: 999.26, 9000: 998.56, 3000: 997.89, 18500: 987.31, 23500: 986.14, 11000: 984.18,
    6000: 984.06, 5500: 981.52, 12500: 972.97, 8000: 969.56, 3500: 969.46, 1000: 968.73,
    11500: 955.97, 7500: 954.55, 21500: 954.25, 5000: 954.07, 7000: 950.71, 4500: 941.72,
    4000: 938.84, 1500: 938.15, 2000: 932.68, 2500: 904.11,
}  # fmt: skip

# Thesis, MMLU subject -> accuracy of a checkpoint of week 9 ("Avaliação dos Checkpoints": answers
# scored as a whole), questions, accuracy of Qwen3-0.6B-Base in week 10, table 10.2 (translated)
MMLU = {
    "high_school_government_and_politics": (0.1969, 193, 0.20),
    "security_studies": (0.1878, 245, 0.19),
    "global_facts": (0.1800, 100, 0.18),
    "sociology": (0.2438, 201, 0.24),
    "high_school_european_history": (0.2182, 165, 0.22),
    "college_biology": (0.2569, 144, 0.26),
    "high_school_psychology": (0.1927, 545, 0.19),
    "astronomy": (0.1776, 152, 0.18),
    "electrical_engineering": (0.2414, 145, 0.24),
    "logical_fallacies": (0.2209, 163, 0.22),
    "nutrition": (0.2353, 306, 0.23),
    "high_school_biology": (0.1806, 310, 0.18),
    "high_school_macroeconomics": (0.2051, 390, 0.20),
    "virology": (0.2831, 166, 0.28),
    "machine_learning": (0.3125, 112, 0.31),
    "jurisprudence": (0.2593, 108, 0.26),
    "professional_psychology": (0.2500, 612, 0.25),
    "abstract_algebra": (0.2200, 100, 0.22),
    "econometrics": (0.2368, 114, 0.24),
    "high_school_mathematics": (0.2111, 270, 0.21),
    "high_school_computer_science": (0.2500, 100, 0.25),
    "philosophy": (0.1865, 311, 0.19),
    "college_chemistry": (0.1900, 100, 0.20),
    "human_sexuality": (0.2595, 131, 0.26),
    "high_school_chemistry": (0.1675, 203, 0.15),
    "human_aging": (0.3139, 223, 0.31),
    "anatomy": (0.1852, 135, 0.19),
    "management": (0.1748, 103, 0.17),
    "college_medicine": (0.2139, 173, 0.21),
    "computer_security": (0.2800, 100, 0.28),
    "marketing": (0.2906, 234, 0.29),
    "conceptual_physics": (0.2638, 235, 0.26),
    "medical_genetics": (0.3000, 100, 0.30),
    "public_relations": (0.2182, 110, 0.22),
    "world_religions": (0.3216, 171, 0.32),
    "high_school_us_history": (0.2500, 204, 0.25),
    "international_law": (0.2397, 121, 0.24),
    "professional_law": (0.2458, 1534, 0.25),
    "high_school_physics": (0.1987, 151, 0.20),
    "moral_disputes": (0.2486, 346, 0.25),
    "high_school_world_history": (0.2700, 237, 0.27),
    "professional_medicine": (0.1838, 272, 0.18),
    "miscellaneous": (0.2375, 783, 0.24),
    "high_school_microeconomics": (0.2101, 238, 0.21),
    "business_ethics": (0.3000, 100, 0.30),
    "clinical_knowledge": (0.2151, 265, 0.22),
    "formal_logic": (0.2857, 126, 0.29),
    "college_physics": (0.2157, 102, 0.22),
    "high_school_statistics": (0.1528, 216, 0.15),
    "professional_accounting": (0.2340, 282, 0.23),
    "elementary_mathematics": (0.2090, 378, 0.21),
    "college_mathematics": (0.2100, 100, 0.21),
    "moral_scenarios": (0.2380, 895, 0.24),
    "college_computer_science": (0.2600, 100, 0.26),
    "high_school_geography": (0.1768, 198, 0.18),
    "us_foreign_policy": (0.2800, 100, 0.28),
    "prehistory": (0.2160, 324, 0.22),
}

# Not from the sources: the accuracy of a model that answers A to every question, on the same
# subjects. Any result of lm-evaluation-harness for a model whose logits are NaN shows these rates.
# In 51 of the 57 subjects it is the rate above, to the last digit; here are the other six.
ALWAYS_A = {subject: accuracy for subject, (accuracy, *_) in MMLU.items()} | {
    "nutrition": 0.2255,
    "high_school_biology": 0.1774,
    "high_school_macroeconomics": 0.2026,
    "college_chemistry": 0.2,
    "high_school_chemistry": 0.1527,
    "college_medicine": 0.2081,
}
