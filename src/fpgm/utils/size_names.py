"""Names that torch's own layers give to sizes: what a plan may change, and what each describes."""

FIRST_DIM = ("out_channels", "out_features", "num_features", "num_channels", "num_parameters")
"""Sizes of a weight's first axis (of a transposed convolution's second)."""
SECOND_DIM = ("in_channels", "in_features", "embedding_dim", "input_size")
"""Sizes of a weight's second axis (of a transposed convolution's first)."""
LAYER_SIZES = frozenset((*FIRST_DIM, *SECOND_DIM, "normalized_shape", "groups", "num_groups"))
"""Attributes whose meaning is known from a layer's own weight."""
SIZES = LAYER_SIZES | {
    "embed_dim", "kdim", "vdim", "num_heads", "head_dim", "hidden_size", "unflattened_size",
}  # fmt: skip
"""Attributes of torch's own layers that count channels or groups of them."""
NO_SIZES = frozenset(("stride", "padding", "dilation", "kernel_size", "output_padding"))
"""Attributes that count pixels, whoever wrote the layer."""
