"""A suite of small runs: a perceptron of a twentieth of the width."""

from kln_jax.analysis.suites import Entry, Suite

SMALL = (("batch_size", 120), ("latent_dim", 8), ("network", "mlp"), ("width", 0.05))
KLN = Entry("KLN", "supervised", SMALL)
DIVERGES = Entry(
    "diverges", "supervised", (*SMALL, ("clip_norm", 0.0), ("learning_rate", 1e9))
)
SUITE = Suite("A small one", "error", ("digits",), (Entry("others"), KLN))
EPOCHS = 3
