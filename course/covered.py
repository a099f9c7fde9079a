"""Where the headings of the documents went that no lesson cites: to a file of the project or to a
lesson that treats the same thing, or nowhere. README.md lists what was left out.

Lessons cite the other headings themselves. A test holds that every heading of published.HEADINGS is
either cited or listed here, and that each file named here exists.
"""

LEFT_OUT = "left out"
FRAME = "a frame, whose sections are listed by themselves"

WHERE = {  # document -> place -> headings
    "Pré-Treino Eficiente de Modelos de Linguagem": {
        FRAME: """
Anotações da Semana 2
Anotações da Semana 3
Anotações da Semana 4
Anotações da Semana 5
Anotações da Semana 7
Anotações da Semana 8
Anotações da Semana 9
Anotações da Semana 10
""",
        "optim.py": """
DeepSeek LLM Scaling Open-Source Language Models With Longtermism
""",
        "prepare_data.py": """
Gerando Dataset
""",
        "flops.py": """
Experimentos Realizados
""",
        "course/17_mfu.py": """
Tabela 6.1
""",
        LEFT_OUT: """
Nemotron-CC: Transforming Common Crawl into a Refined Long-Horizon Pretraining Dataset (May, 2025)
Nemotron-H - (Set,2025)
Nemotron-3 (Nov, 2023)
""",
        "config.py": """
Iniciando um novo pré-treino em português
The Smol Training Playbook: The Secrets to Building World-Class LLMs
Tabela 8.1
Tabela 9.2
Tabela 9.3
""",
        "instruments/report.py": """
Comparativo da loss
""",
        "eval.py": """
Inferência em alguns checkpoints
""",
        "instruments/exams.py": """
Tabela 10.1
""",
    },
    "NfNN": {
        FRAME: """
1.1 Conceitos iniciais de bibliotecas de diferenciação automática
1.2 Análise de diferentes bibliotecas de diferenciação automática
""",
        "course/12_autograd.py": """
1.1.1 Bibliotecas de aprendizagem profunda vs diferenciação automática
1.1.3 Operações em tensores
1.1.4 Descida de gradiente
Algoritmo 3
Algoritmo 4
Figura 3.1
""",
        LEFT_OUT: """
1.2.1 PyTorch
1.2.2 TensorFlow
1.2.4 GGML
1.2.5 TinyGrad
1.3 Discussão
3.1 Escolha de linguagem
""",
        "config.py": """
2.2 Hiperparâmetros
""",
        "course/26_tensor.py": """
2.3 Paralelismo de modelo vs paralelismo de dados
""",
        "course/31_server.py": """
4.1 Descrição do conjunto de dados
4.2 Descrição do modelo
4.4 Descrição dos ambientes de teste
4.5 Resultados
4.6 Discussão
Conclusão
""",
    },
    "Armazenamento": {
        "course/11_storage.py": """
O que “armazenamento” significa em ML em larga escala
Exemplo prático: streaming de shards WebDataset com cache local
Recomendações práticas (padrões testados em batalha)
""",
        FRAME: """
Armazenamento de conjuntos de dados: de dados brutos a shards prontos para treinamento
Padrões de armazenamento para treinamento em larga escala
Confiabilidade, consistência e segurança
""",
        "prepare_data.py": """
Conjuntos de dados brutos vs processados
""",
        "machinery/shards.py": """
Formatos comuns de conjunto de dados e por que são usados
Estratégia de fragmentação em shards (regras práticas)
Determinismo e versionamento do conjunto de dados
Padrão 2: Sistema de arquivos paralelo compartilhado para conjuntos de dados quentes
""",
        "instruments/stage.py": """
Padrão 4: Preparar (staging) conjuntos de dados nos nós antes do treinamento começar
""",
        "machinery/checkpoint.py": """
Checkpointing assíncrono
Exemplo prático: publicação segura de diretório de checkpoint
Políticas de retenção
Padrão 3: Checkpointing em dois níveis (local e depois remoto)
""",
        LEFT_OUT: """
Hierarquia de armazenamento e por que ela importa
Padrão 5: Streaming + pré-processamento online (com cuidado)
Controle de acesso e privacidade
Escolhas de armazenamento interagem com escolhas de modelo/runtime
""",
        "instruments/profiler.py": """
Engenharia de desempenho: diagnosticando gargalos de armazenamento
""",
        "course/10_prefetch.py": """
O que medir
Sintomas de que você está limitado por E/S
""",
        "machinery/disk.py": """
Semântica de consistência
""",
    },
}
