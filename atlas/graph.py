"""Labels and relationship types with their properties: the declarations behind `atlas/schema.py`.

Weights are input-invariant: the norms' scales are left out of them. Their unit, residual-stream units times
the reading's units, is written "weight units".
"""

from __future__ import annotations

from atlas.columns import Column, Kind, NodeTable, RelationshipTable

__all__ = ["NODES", "RELATIONSHIPS"]

ID = Column("id", Kind.INT, "the atlas's integer for this node: block of its owner + number")
STEP = Column("step", Kind.INT, "id of the Step that made it")


def _key(pattern: str) -> Column:
    return Column("key", Kind.STRING, f"`{pattern}`")


def _node(label: str, key: str, description: str, *columns: Column) -> NodeTable:
    return NodeTable(label, key, description, (ID, _key(key), *columns, STEP))


def _optional(name: str, kind: Kind, description: str, unit: str = "") -> Column:
    return Column(name, kind, description, unit, nullable=True)


MODEL_FACTS = (
    Column("name", Kind.STRING, "the model's name in the spec"),
    Column("hash", Kind.STRING, "SHA-256 over the canonical float32 tensors"),
    Column("architecture", Kind.STRING, "the configuration's model type"),
    Column("n_layers", Kind.INT, "number of blocks"),
    Column("d_model", Kind.INT, "width of the residual stream"),
    Column("n_heads", Kind.INT, "query heads in a layer"),
    Column("n_kv_heads", Kind.INT, "key-value heads in a layer"),
    Column("d_head", Kind.INT, "width of a head"),
    Column("d_mlp", Kind.INT, "neurons in a layer"),
    Column("d_vocab", Kind.INT, "rows of the embedding"),
    Column("n_ctx", Kind.INT, "longest context", "tokens"),
    Column("parallel", Kind.BOOLEAN, "attention and MLP read the same stream, side by side"),
    Column("gated", Kind.BOOLEAN, "the MLP's neurons are gated: they read twice"),
    Column("activation", Kind.STRING, "the MLP's activation function"),
    Column("dtype", Kind.STRING, "type of the weights on disk; all are widened exactly to float32"),
    Column("facts", Kind.STRING, "every fact of the architecture, as JSON"),
)

FEATURE_NORMS = (
    Column(
        "write_norm",
        Kind.DOUBLE,
        "length of the writing vector, of several writes of their sum",
        "residual-stream units",
    ),
    Column("read_norm", Kind.DOUBLE, "length of the reading vector (`in`, or `gate` of a gated neuron)"),
    _optional("read_norm_up", Kind.DOUBLE, "length of the `up` reading vector of a gated neuron"),
)

FEATURE_STATISTICS = (
    _optional("firing_rate", Kind.DOUBLE, "share of the corpus's positions where it is active", "per token"),
    _optional("mean_activation", Kind.DOUBLE, "E[a] over all positions", "activation units"),
    _optional("mean_square_activation", Kind.DOUBLE, "E[a²] over all positions", "activation units squared"),
    _optional("max_activation", Kind.DOUBLE, "largest activation seen", "activation units"),
    _optional("top_tokens", Kind.STRING, "tokens of its highest activations, as JSON"),
    _optional("bottom_tokens", Kind.STRING, "tokens of its lowest activations, as JSON"),
)

SET_COLUMNS = (
    Column("name", Kind.STRING, "the set's name in the spec"),
    Column("alias", Kind.STRING, "short name accepted in feature keys", nullable=True),
    Column("kind", Kind.STRING, "transcoder, cross-layer transcoder, sae, snmf, neurons"),
    Column("format", Kind.STRING, "the file format it was read from"),
    Column("hash", Kind.STRING, "hash over the hashes of its dictionaries"),
    Column("provenance", Kind.STRING, "where it came from, as JSON"),
)

DICTIONARY_COLUMNS = (
    Column("layer", Kind.INT, "layer of the site it reads"),
    Column(
        "site", Kind.STRING, "the site it reads, as in its key: `mlp` (its input), `attn.z`, `resid_post` …"
    ),
    Column("size", Kind.INT, "number of features"),
    Column("activation", Kind.STRING, "its gate: relu, jumprelu, topk …"),
    Column("reads", Kind.STRING, "what it reads, as JSON: site and space"),
    Column("writes", Kind.STRING, "what it writes, as JSON: layers, sites, at the module or at the stream"),
    Column("readings", Kind.STRING, "names of its readings, comma-separated: `in`, or `gate,up`"),
    Column("hash", Kind.STRING, "SHA-256 over its tensors and gate"),
)

DICTIONARY_EVALUATION = (
    _optional("fvu", Kind.DOUBLE, "fraction of variance unexplained"),
    _optional("l0", Kind.DOUBLE, "mean number of active features", "per token"),
    _optional("dead", Kind.INT, "features that never fired"),
    _optional("recovered", Kind.DOUBLE, "share of cross-entropy recovered against zero ablation"),
)

NODES: dict[str, NodeTable] = {
    table.label: table
    for table in (
        _node("Model", "model", "A language model, seen from its residual stream.", *MODEL_FACTS),
        _node(
            "DictionarySet",
            "model/set",
            "Dictionaries of one kind over the layers of a model.",
            Column("model", Kind.STRING, "name of the model"),
            *SET_COLUMNS,
        ),
        _node(
            "Dictionary",
            "model/set/L08.mlp",
            "The features that read one site.",
            Column("model", Kind.STRING, "name of the model"),
            Column("set", Kind.STRING, "name of the set"),
            *DICTIONARY_COLUMNS,
            *DICTIONARY_EVALUATION,
        ),
        _node(
            "Feature",
            "model/set/L08.mlp/355",
            "Anything that reads and writes the residual stream: a latent, a neuron, an SNMF factor.",
            Column("model", Kind.STRING, "name of the model"),
            Column("set", Kind.STRING, "name of the set"),
            Column("layer", Kind.INT, "layer of the site it reads"),
            Column("site", Kind.STRING, "the site it reads"),
            Column("kind", Kind.STRING, "the set's kind"),
            Column("number", Kind.INT, "its row in the dictionary"),
            _optional("label", Kind.STRING, "a name given by a person or a program"),
            _optional("label_source", Kind.STRING, "who gave the label: the source of an import"),
            _optional("label_score", Kind.DOUBLE, "how well the label fits, by the import's own score"),
            *FEATURE_NORMS,
            *FEATURE_STATISTICS,
        ),
        _node(
            "Head",
            "model/L08.H03",
            "An attention head.",
            Column("model", Kind.STRING, "name of the model"),
            Column("layer", Kind.INT, "its layer"),
            Column("number", Kind.INT, "its number within the layer"),
            Column("edges", Kind.INT, "number of VIA_HEAD edges through it"),
            Column("total_weight", Kind.DOUBLE, "Σ|weight| of the VIA_HEAD edges through it", "weight units"),
        ),
        _node(
            "Token",
            "model/id",
            "An entry of a model's vocabulary.",
            Column("model", Kind.STRING, "name of the model"),
            Column("number", Kind.INT, "the token's id in the vocabulary"),
            Column("text", Kind.STRING, "the token as text, its leading space kept"),
        ),
        _node(
            "Context",
            "hash",
            "A window of text and the token predicted after it.",
            Column("model", Kind.STRING, "name of the model"),
            Column("corpus", Kind.STRING, "name of the corpus"),
            Column("document", Kind.INT, "number of the document in the corpus"),
            Column("tokens", Kind.STRING, "token ids, as JSON"),
            Column("text", Kind.STRING, "the tokens as text"),
            Column("position", Kind.INT, "position of the last token of the window", "tokens"),
            Column("target", Kind.INT, "id of the next token"),
            Column("loss", Kind.DOUBLE, "-log p(target)", "nats"),
        ),
        _node(
            "Cluster",
            "run/number",
            "Contexts whose next token the model predicts by similar means.",
            Column("model", Kind.STRING, "name of the model"),
            Column("number", Kind.INT, "its number within the clustering"),
            Column("size", Kind.INT, "number of contexts"),
            Column("summary", Kind.STRING, "what its contexts share"),
            Column("quality", Kind.DOUBLE, "mean silhouette of its contexts"),
        ),
        _node(
            "Circuit",
            "hash",
            "The features that carry a behaviour, of a cluster or of one prompt.",
            Column("model", Kind.STRING, "name of the model"),
            Column("method", Kind.STRING, "how it was found"),
            Column("metric", Kind.STRING, "the quantity explained"),
            Column("prompt", Kind.STRING, "the prompt, or null for a cluster's circuit", nullable=True),
            Column("node_threshold", Kind.DOUBLE, "threshold on nodes"),
            Column("edge_threshold", Kind.DOUBLE, "threshold on edges"),
            _optional("faithfulness", Kind.DOUBLE, "(m(C) - m(∅)) / (m(M) - m(∅))"),
            _optional("completeness", Kind.DOUBLE, "the same of the complement"),
        ),
        _node(
            "Occurrence",
            "circuit/number",
            "One node of one circuit.",
            Column("number", Kind.INT, "its number within the circuit"),
            Column("kind", Kind.STRING, "feature, error, embedding, position, bias, head, logit"),
            Column("layer", Kind.INT, "its layer"),
            _optional(
                "position", Kind.INT, "its position in the prompt, null when positions are summed", "tokens"
            ),
            _optional("activation", Kind.DOUBLE, "its activation", "activation units"),
            _optional("effect", Kind.DOUBLE, "its effect on the metric", "units of the metric"),
            _optional("influence", Kind.DOUBLE, "its share of the normalised influence"),
        ),
        NodeTable(
            "Run",
            "hash",
            "One build: a spec carried out by a version of the code.",
            (
                ID,
                _key("hash"),
                Column("spec", Kind.STRING, "the spec, as canonical JSON"),
                Column("code_version", Kind.STRING, "version of circuit-atlas"),
                Column("started", Kind.STRING, "ISO 8601, UTC"),
                Column("ended", Kind.STRING, "ISO 8601, UTC", nullable=True),
                Column("status", Kind.STRING, "done, failed or cancelled"),
            ),
        ),
        NodeTable(
            "Step",
            "hash",
            "One pure computation: kind, version, parameters, inputs.",
            (
                ID,
                _key("hash"),
                Column("kind", Kind.STRING, "what it computes"),
                Column("title", Kind.STRING, "the same for people"),
                Column("figures", Kind.STRING, "what it reported (kept, dropped, floor), as JSON"),
            ),
        ),
    )
}

READING = Column(
    "reading", Kind.NAME, "`in`, or `gate` / `up` of a gated neuron: through which the target reads"
)
WEIGHT = Column("weight", Kind.FLOAT, "the float32 of the exact product", "weight units")
SELECTED = (
    READING,
    WEIGHT,
    Column("z", Kind.FLOAT, "weight · √d / (|writing| |reading|): 1 is the size of a chance weight"),
    Column(
        "rank_in",
        Kind.SMALL_INT,
        "1, 2 … among the target's kept edges of this type and reading, by |weight|",
    ),
    Column(
        "rank_out",
        Kind.SMALL_INT,
        "1, 2 … among the source's kept edges of this type and reading, by |weight|",
    ),
)
USE_ON_TEXT = (
    _optional("coactivation", Kind.INT, "positions of the corpus where both ends were active; 0: never used"),
    _optional(
        "twera",
        Kind.DOUBLE,
        "(E[a_target a_source] / E[a_target]) · weight (Circuit Tracing)",
        "weight units",
    ),
    _optional("rank_in_twera", Kind.SMALL_INT, "like rank_in, by |twera|"),
    _optional("rank_out_twera", Kind.SMALL_INT, "like rank_out, by |twera|"),
)
HEAD_NUMBERS = (
    Column("layer", Kind.LAYER, "the head's layer"),
    Column("head", Kind.LAYER, "the head's number within the layer"),
)
TOKEN_RANK = Column("rank", Kind.SMALL_INT, "1, 2 … by |weight| within its sign")


def _relationship(
    type: str, ends: str, description: str, *columns: Column, arrays: bool = False
) -> RelationshipTable:
    source, target = ends.split(" -> ")
    return RelationshipTable(type, source, target, description, (*columns, STEP), arrays)


RELATIONSHIPS: dict[str, RelationshipTable] = {
    table.type: table
    for table in (
        _relationship(
            "DIRECT",
            "Feature -> Feature",
            "The input-invariant weight: writing vector of the source · reading vector of the target. Of a"
            " source that writes in several layers the sum of those below the target counts.",
            *SELECTED,
            *USE_ON_TEXT,
            arrays=True,
        ),
        _relationship(
            "VIA_HEAD",
            "Feature -> Feature",
            "The same through one head's value and output matrices. Into what reads attention's output, or z,"
            " through the heads of its own layer.",
            *HEAD_NUMBERS,
            *SELECTED,
            *USE_ON_TEXT,
            arrays=True,
        ),
        _relationship(
            "EMBEDS",
            "Token -> Feature",
            "De-embedding: the token's embedding · reading vector.",
            READING,
            WEIGHT,
            TOKEN_RANK,
            arrays=True,
        ),
        _relationship(
            "PROMOTES",
            "Feature -> Token",
            "Logit effect: writing vector through the unembedding, minus its mean over tokens.",
            WEIGHT,
            TOKEN_RANK,
            arrays=True,
        ),
        _relationship(
            "USES",
            "Feature -> Feature",
            "An SNMF factor's neurons.",
            Column("weight", Kind.FLOAT, "the neuron's entry in the factor"),
        ),
        _relationship("PART_OF", "Feature -> Feature", "The hierarchy: the source is a part of the target."),
        _relationship(
            "FIRES_ON",
            "Feature -> Context",
            "An example of the feature's activity.",
            Column("activation", Kind.DOUBLE, "activation at the context's position", "activation units"),
        ),
        _relationship("IN_CLUSTER", "Context -> Cluster", "Membership of a context."),
        _relationship("EXPLAINS", "Circuit -> Cluster", "The circuit was found on the cluster's contexts."),
        _relationship("IN_CIRCUIT", "Occurrence -> Circuit", "Membership of a circuit's node."),
        _relationship("OF_FEATURE", "Occurrence -> Feature", "The feature that occurs."),
        _relationship("AT_HEAD", "Occurrence -> Head", "The head that occurs."),
        _relationship("AT_TOKEN", "Occurrence -> Token", "The token embedded or predicted."),
        _relationship(
            "CONTRIBUTES",
            "Occurrence -> Occurrence",
            "An edge of a circuit.",
            Column("weight", Kind.DOUBLE, "linear contribution to the target", "activation units"),
            Column("effect", Kind.DOUBLE, "effect on the metric through this edge", "units of the metric"),
        ),
        _relationship(
            "MATCHES",
            "Feature -> Feature",
            "The same feature in another model, as far as activations tell.",
            Column("score", Kind.DOUBLE, "similarity of the two"),
            Column("floor", Kind.DOUBLE, "the best score by chance"),
            Column("ceiling", Kind.DOUBLE, "the score of the same model's resampled activations"),
            Column("mutual", Kind.BOOLEAN, "each is the other's best match"),
        ),
        RelationshipTable("USED", "Run", "Step", "The run needed the step's result.", ()),
    )
}
