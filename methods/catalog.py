"""The spine: one row a system. The command line, the README's table, the layering test and the results page all read it.

Whether a system is built is never written here: `papyrax.train.proofs` computes it from the modules, tests and results that exist.
"""

from __future__ import annotations

import dataclasses
import difflib


@dataclasses.dataclass(frozen=True)
class System:
    """One system: where it comes from, what it does, and where its parts live.

    `worlds` are modules under `papyrax.envs`, `ops` are folders of `papyrax.jaxlib_ext` that its hot loops run in. `no_kernel` says
    why no hot loop of it pays for a kernel, where that is so.
    """

    name: str
    field: str
    title: str
    paper: str
    says: str
    worlds: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    no_kernel: str = ""

    @property
    def method(self) -> str:
        """Import path of the mathematics."""
        return f"papyrax.methods.{self.field}.{self.name}"

    @property
    def recipe(self) -> str:
        """Import path of the experiment."""
        return f"papyrax.train.recipes.{self.field}.{self.name}"

    @property
    def tests(self) -> tuple[str, ...]:
        """Glob patterns of its test modules, from the root of a checkout."""
        return (
            f"tests/methods/{self.field}/test_{self.name}*.py",
            f"tests/train/recipes/{self.field}/test_{self.name}*.py",
        )

    @property
    def link(self) -> str:
        """Where the paper is read."""
        if self.paper.startswith("arXiv "):
            return f"https://arxiv.org/abs/{self.paper[len('arXiv ') :]}"
        return f"https://openreview.net/forum?id={self.paper[len('OpenReview ') :]}"


FIELDS = (
    "control",
    "rendering",
    "generation",
    "optimization",
    "perception",
    "molecules",
    "language",
    "retrieval",
    "agents",
    "evaluation",
)

CATALOG: tuple[System, ...] = (
    System(
        "reppo",
        "control",
        "Relative Entropy Pathwise Policy Optimization",
        "arXiv 2507.11019",
        "On-policy actor-critic that improves the policy by the gradient of Q through its own actions, inside a KL bound, with no replay buffer.",
        worlds=("pendulums", "classic", "physics", "rollout"),
        ops=("hl_gauss", "linear_norm"),
    ),
    System(
        "darp",
        "control",
        "Difference-Aware Retrieval Policies for Imitation Learning",
        "arXiv 2606.09758",
        "Imitation that retrieves expert states and acts on the differences to them, so the policy stays where it has data.",
        worlds=("physics",),
        ops=("topk",),
    ),
    System(
        "universal_beta_splatting",
        "rendering",
        "Universal Beta Splatting",
        "arXiv 2510.03312",
        "Radiance fields of N-dimensional Beta kernels over position, view direction and time, sliced and splatted.",
        worlds=("scenes",),
        ops=("splat_raster",),
    ),
    System(
        "geer",
        "rendering",
        "3DGEER: 3D Gaussian Rendering Made Exact and Efficient for Generic Cameras",
        "arXiv 2505.24053",
        "Gaussians rendered by their exact integral along every ray, for any camera, with a closed-form bounding frustum.",
        worlds=("scenes",),
        ops=("splat_raster",),
    ),
    System(
        "sat3dgen",
        "rendering",
        "Sat3DGen: Comprehensive Street-Level 3D Scene Generation from Single Satellite Image",
        "arXiv 2605.14984",
        "One overhead picture becomes a feature field that renders street views, panoramas and a height map.",
        worlds=("scenes",),
    ),
    System(
        "ggball",
        "generation",
        "GGBall: Graph Generative Model on Poincaré Ball",
        "arXiv 2506.07198",
        "Graphs drawn by flow matching along geodesics of a hyperbolic, quantised latent space.",
        ops=("poincare_distance",),
    ),
    System(
        "video_as_prompt",
        "generation",
        "Video-As-Prompt: Unified Semantic Control for Video Generation",
        "arXiv 2510.20888",
        "A trained copy of a frozen video transformer's blocks carries the meaning of a reference video into a new one.",
        ops=("attention",),
    ),
    System(
        "clipped_sgd",
        "optimization",
        "High-Probability Bounds for the Last Iterate of Clipped SGD",
        "OpenReview 4sGEvpwyxN",
        "Clipped stochastic gradients whose last iterate converges with high probability under heavy-tailed noise.",
        no_kernel="one fused elementwise pass over the parameters: XLA already writes it as a single loop",
    ),
    System(
        "riemannian_frank_wolfe",
        "optimization",
        "Strongly Convex Sets in Riemannian Manifolds",
        "arXiv 2312.03583",
        "Projection-free optimisation over strongly convex sets of curved spaces, at a linear rate.",
        no_kernel="a step is one small eigendecomposition or a few vector operations: nothing to fuse",
    ),
    System(
        "information_estimation_metric",
        "perception",
        "Learning a distance measure from the information-estimation geometry of data",
        "arXiv 2510.02514",
        "A distance between images from the denoising errors that a density's denoiser makes on them under shared noise.",
        ops=("neighborhood_attention",),
    ),
    System(
        "distmlip",
        "molecules",
        "DistMLIP: A Distributed Inference Platform for Machine Learning Interatomic Potentials",
        "arXiv 2506.02023",
        "One large atomic structure cut over many devices, each edge computed once, borders exchanged after every layer.",
        ops=("segment",),
    ),
    System(
        "dynamic_mpnn",
        "molecules",
        "Multi-state Protein Design with DynamicMPNN",
        "arXiv 2507.21938",
        "One amino-acid sequence designed for several conformations at once by a rotation-equivariant graph network.",
        ops=("segment",),
    ),
    System(
        "raftppi",
        "molecules",
        "Fast Proteome-Scale Protein Interaction Retrieval via Residue-Level Factorization",
        "OpenReview Dp1RM3gPg8",
        "Residue-level interaction scores turned into one inner product, so that partners in a proteome are found by vector search.",
        ops=("topk",),
    ),
    System(
        "pretrained_variational_bridge",
        "molecules",
        "Unified Biomolecular Trajectory Generation via Pretrained Variational Bridge",
        "arXiv 2602.07588",
        "Molecular motion in long steps by a learned stochastic bridge, pretrained on single structures.",
        ops=("segment",),
    ),
    System(
        "fusedkv",
        "language",
        "Reconstructing KV Caches with Cross-Layer Fusion for Enhanced Transformers",
        "arXiv 2512.03870",
        "Upper layers rebuild their keys and values from two lower layers, which halves the cache.",
        ops=("attention", "vocab"),
    ),
    System(
        "wavefront_diffusion",
        "language",
        "WavefrontDiffusion: Dynamic Decoding Schedule for Improved Reasoning",
        "arXiv 2511.19473",
        "A masked-diffusion language model finalises tokens along a front that grows around what is already fixed.",
        worlds=("sandbox",),
        ops=("vocab",),
    ),
    System(
        "tracedet",
        "language",
        "TraceDet: Hallucination Detection from the Decoding Trace of Diffusion Large Language Models",
        "arXiv 2510.01274",
        "Hallucinations found in the entropies that a diffusion language model passes through while it denoises.",
        ops=("vocab",),
    ),
    System(
        "charm",
        "language",
        "Neural Message-Passing on Attention Graphs for Hallucination Detection",
        "arXiv 2509.24770",
        "Hallucinations found by message passing on the graph that a model's attention draws over its tokens.",
        ops=("segment", "key_mass"),
    ),
    System(
        "arc_jsd",
        "language",
        "Attributing Response to Context: A Jensen–Shannon Divergence Driven Mechanistic Study of Context Attribution in Retrieval-Augmented Generation",
        "arXiv 2505.16415",
        "The sentence of the context that an answer rests on, and the heads that carry it, from how far the answer's distribution moves.",
        ops=("vocab", "attention"),
    ),
    System(
        "avar",
        "language",
        "From Narrow to Panoramic Vision: Attention-Guided Cold-Start Reshapes Multimodal Reasoning",
        "arXiv 2603.03825",
        "How much text tokens attend to the image, measured, and raised by two attention losses and a reward.",
        ops=("key_mass",),
    ),
    System(
        "mergeprag",
        "language",
        "MergePRAG: Orthogonal Merging of Passage-experts for Multi-hop Parametric RAG",
        "OpenReview FSL1J2gmJV",
        "Passages become small key-value memories that are merged orthogonally into a frozen model, hop by hop.",
        ops=("attention",),
    ),
    System(
        "adacache",
        "language",
        "AdaCache: Adaptive Caching and Context Augmentation for Efficient LLM Serving",
        "OpenReview Bmvx8ybDzo",
        "Retrieved chunks reuse cached keys and values in three tiers and recompute only the tokens that matter.",
        ops=("attention", "key_mass", "paged_attention"),
    ),
    System(
        "active_indexing",
        "language",
        "Cite Pretrain: Retrieval-Free Knowledge Attribution for Large Language Models",
        "arXiv 2506.17585",
        "A model learns in continued pretraining to name the documents that its facts come from.",
        ops=("vocab",),
    ),
    System(
        "compactds",
        "retrieval",
        "Frustratingly Simple Retrieval Improves Challenging, Reasoning-Intensive Benchmarks",
        "arXiv 2507.01297",
        "A web-scale store on one machine: compressed search in memory, exact search from disk.",
        ops=("pq_scan", "topk"),
    ),
    System(
        "searchagent_x",
        "retrieval",
        "Demystifying and Enhancing the Efficiency of Large Language Model Based Search Agents",
        "arXiv 2505.12065",
        "Serving for models that search while they think: graph search that stops when ripe, and scheduling by cached prefix.",
        ops=("paged_attention", "topk"),
    ),
    System(
        "u_marvel",
        "retrieval",
        "U-MARVEL: Unveiling Key Factors for Universal Multimodal Retrieval via Embedding Learning with MLLMs",
        "arXiv 2507.14902",
        "A multimodal language model turned into one embedding for any query and any candidate.",
        ops=("info_nce", "topk"),
    ),
    System(
        "dghdgh",
        "retrieval",
        "Deep Global-sense Hard-negative Discriminative Generation Hashing for Cross-modal Retrieval",
        "OpenReview GAQEsnnQtG",
        "Pictures and texts as short binary codes, trained with hard negatives made from the whole batch's relations.",
        ops=("hamming",),
    ),
    System(
        "clause",
        "agents",
        "CLAUSE: Agentic Neuro-Symbolic Knowledge Graph Reasoning via Dynamic Learnable Context Engineering",
        "arXiv 2509.21035",
        "Three agents build a context from a knowledge graph under budgets that learned prices enforce.",
        worlds=("knowledge_graph",),
    ),
    System(
        "micro_macro_retrieval",
        "agents",
        "Micro-Macro Retrieval: Reducing Long-Form Hallucination in Large Language Models",
        "arXiv 2605.28828",
        "An agent that retrieves while it thinks and again, fact by fact, while it answers.",
        ops=("vocab",),
    ),
    System(
        "chain_of_decomposition",
        "agents",
        "Enhancing LLMs for Knowledge Base Question Answering by Chain-of-Decomposition",
        "OpenReview 4vfEo07rmv",
        "Questions over a knowledge graph as three small tasks: keep relations, string paths, say yes or no.",
        worlds=("knowledge_graph",),
    ),
    System(
        "viscoder2",
        "agents",
        "VisCoder2: Building Multi-Language Visualization Coding Agents",
        "arXiv 2510.23642",
        "Models that write plotting code in many languages, run it, look, and repair it.",
        worlds=("sandbox",),
        ops=("attention", "vocab"),
    ),
    System(
        "aria",
        "agents",
        "Aria: an Agent for Retrieval and Iterative Auto-Formalization via Dependency Graph",
        "arXiv 2510.04520",
        "Informal mathematics made into compiling Lean statements over a graph of the concepts they use.",
        worlds=("lean",),
        ops=("topk",),
    ),
    System(
        "trustjudge",
        "evaluation",
        "TrustJudge: Inconsistencies of LLM-as-a-Judge and How to Alleviate Them",
        "arXiv 2509.21117",
        "A judge's whole distribution in place of its one sampled grade, so that scores and comparisons agree.",
        ops=("vocab",),
    ),
    System(
        "personalized_deep_research",
        "evaluation",
        "Towards Personalized Deep Research: Benchmarks and Evaluations",
        "arXiv 2509.25106",
        "Does a research agent write the report that this person needs: tasks, profiles, three axes of scoring.",
    ),
    System(
        "human_mme",
        "evaluation",
        "Human-MME: A Holistic Evaluation Benchmark for Human-Centric Multimodal Large Language Models",
        "arXiv 2509.26165",
        "How well multimodal models see and reason about people, from boxes to motives.",
    ),
    System(
        "scholscan",
        "evaluation",
        "Not Search, But Scan: Benchmarking MLLMs on Scan-Oriented Academic Paper Reasoning",
        "arXiv 2603.28651",
        "Whole papers read for errors that nobody points at, scored on detection, evidence and reasoning.",
        ops=("segment", "topk"),
    ),
    System(
        "memory_agent_bench",
        "evaluation",
        "Evaluating Memory in LLM Agents via Incremental Multi-Turn Interactions",
        "arXiv 2507.05257",
        "What an agent still knows after a long text came in turn by turn: recall, learning, understanding, forgetting.",
        ops=("topk",),
    ),
    System(
        "dream",
        "evaluation",
        "Completing Missing Annotation: Multi-Agent Debate for Accurate and Scalable Relevance Assessment for IR Benchmarks",
        "arXiv 2602.06526",
        "Relevance labels settled by two models that debate from opposite stances, and benchmarks with their holes filled.",
        ops=("vocab", "topk"),
    ),
)


def names() -> tuple[str, ...]:
    """The 38 names, in catalogue order."""
    return tuple(system.name for system in CATALOG)


def find(name: str) -> System:
    """The row of that name. Raises KeyError with one sentence that names the nearest ones."""
    for system in CATALOG:
        if system.name == name:
            return system
    near = difflib.get_close_matches(name.lower().replace("-", "_"), names(), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `papyrax list` shows them all"
    raise KeyError(f"there is no system named {name!r}{hint}")
