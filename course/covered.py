"""Where the headings of the documents went that no lesson cites: to a file that treats the same
thing, or nowhere. README.md lists what was left out.

Lessons cite the headings in published.CITED. Here a line is `heading | words`: words that stand in
the file named above it, where the thing is treated, for LEFT_OUT in README.md's last section; a
test looks for them. Covers, forms, lists and headings of mere frames are not listed.
"""

# ruff: noqa: E501  a heading and its words stand on one line

LEFT_OUT = "left out"

WHERE = {  # document -> place -> headings
    "Pré-Treino Eficiente de Modelos de Linguagem": {
        "optim.py": """
DeepSeek LLM Scaling Open-Source Language Models With Longtermism | DeepSeek LLM, section 2.3
""",
        "prepare_data.py": """
Gerando Dataset | Text -> tokenizer -> packed rows on disk
""",
        "course/published.py": """
Experimentos Realizados | "Experimentos Realizados", table 7.1
""",
        "instruments/run/profiler.py": """
Código Gerado: | mechanism behind `train.py --profile`
""",
        LEFT_OUT: """
Nemotron-CC: Transforming Common Crawl into a Refined Long-Horizon Pretraining Dataset (May, 2025) | Nemotron-CC
Nemotron-H - (Set,2025) | state-space and hybrid models
The Smol Training Playbook: The Secrets to Building World-Class LLMs | Everyday Conversations
""",
        "config.py": """
Iniciando um novo pré-treino em português | cnmoro/reasoning-v1-20m-portuguese
Tabela 8.1 | 1,024 rows x 2,048
Tabela 9.2 | "gigaverbo=60", "reasoning=30", "finemath=5", "infiwebmath=5"
Tabela 9.3 | 512 rows x 4,096
""",
        "instruments/pages/report.py": """
Comparativo da loss | several runs in one picture
""",
        "eval.py": """
Inferência em alguns checkpoints | continue prompts
Resposta do checkpoint 8k - 16.7B de tokens | continue prompts
Resposta do checkpoint 10500 - 22B de tokens | continue prompts
""",
        "instruments/exams/tournament.py": """
Prompts gerados com o Gemini: | checkpoints continue the same prompts
""",
    },
    "NfNN": {
        "course/02_gradient.py": """
1.1.4 Descida de gradiente | **gradient descent**
Algoritmo 2 | def descend
""",
        "course/12_autograd.py": """
Algoritmo 1 | x * x + x * y + y * y
Algoritmo 3 | def topological
Algoritmo 4 | def backward
Figura 3.1 | a *topological* order
""",
        "course/25_zero.py": """
2.3 Paralelismo de modelo vs paralelismo de dados | The other ways cut something else
""",
        "course/lesson.py": """
4.1 Descrição do conjunto de dados | MNIST without a download
""",
        "course/31_server.py": """
4.2 Descrição do modelo | 784-32-10
4.4 Descrição dos ambientes de teste | "Datacenter", "Sync"
4.5 Resultados | TABLE_4_1
4.6 Discussão | more workers are more accurate
""",
        LEFT_OUT: """
1.1.3 Operações em tensores | vector instructions
1.1.1 Bibliotecas de aprendizagem profunda vs diferenciação automática | a survey of autodiff libraries
1.2.1 PyTorch | a survey of autodiff libraries
1.2.2 TensorFlow | a survey of autodiff libraries
1.2.3 JAX | a survey of autodiff libraries
1.2.4 GGML | a survey of autodiff libraries
1.2.5 TinyGrad | a survey of autodiff libraries
1.3 Discussão | a survey of autodiff libraries
3.1 Escolha de linguagem | an autodiff library in C
2.2 Hiperparâmetros | a search for hyperparameters spread over machines
""",
    },
    "Armazenamento": {
        "prepare_data.py": """
Conjuntos de dados brutos vs processados | Text -> tokenizer -> packed rows on disk
""",
        "machinery/shards.py": """
Estratégia de fragmentação em shards (regras práticas) | SHARD_ROWS = 16_384
Determinismo e versionamento do conjunto de dados | The manifest lists every file with its sha256
""",
        "machinery/stage.py": """
Padrão 2: Sistema de arquivos paralelo compartilhado para conjuntos de dados quentes | a slow folder
Padrão 4: Preparar (staging) conjuntos de dados nos nós antes do treinamento começar | once per node
""",
        "machinery/checkpoint.py": """
Checkpointing assíncrono | background saves
Políticas de retenção | how many of the newest stay
Padrão 3: Checkpointing em dois níveis (local e depois remoto) | mirror
""",
        "instruments/run/profiler.py": """
Engenharia de desempenho: diagnosticando gargalos de armazenamento | data wait
Sintomas de que você está limitado por E/S | in `idle` the device waits for the host
""",
        "machinery/log.py": """
O que medir | data_wait_ms
""",
        "machinery/disk.py": """
Semântica de consistência | whole or not there
""",
        "course/exercises/ex11.py": """
Exemplo prático: publicação segura de diretório de checkpoint | publish a folder on a disk that forgets
""",
        LEFT_OUT: """
Hierarquia de armazenamento e por que ela importa | the hierarchy of storage
Formatos comuns de conjunto de dados e por que são usados | WebDataset, TFRecord and MDS
Exemplo prático: streaming de shards WebDataset com cache local | WebDataset, TFRecord and MDS
Padrão 5: Streaming + pré-processamento online (com cuidado) | tokenizing while training
Controle de acesso e privacidade | encryption, access control and audit
Escolhas de armazenamento interagem com escolhas de modelo/runtime | what it means for the model
""",
    },
    "擴展的驚喜": {
        "machinery/stage.py": """
我們叢集中的儲存選項 | a slow folder
修復 #1 – 更改資料儲存 | Data brought to a local disk
""",
        "data.py": """
修復 #2 – 引入 TokenizedBytes dataloader | A pure function: nothing to save, nothing to replay
修復 #3 – 在序列層級隨機排列 | permutation of the source's rows
""",
        "course/28_twins.py": """
謎題 #4 – 不滿意的效能 | whose tensor-parallel ranks all had one seed
修復 #4 - 最終修復 | the seed plus its number
""",
        "machinery/log.py": """
為什麼輸送量很重要 | tokens_per_s
""",
        LEFT_OUT: """
知道何時修補 vs. 修復 | when to patch
""",
    },
}
