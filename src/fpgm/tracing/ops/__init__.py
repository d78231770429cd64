"""Rules: what each ATen operator does to channel labels, one file per kind of operator.

- `base`: the type of a rule, and the interface of the tracer
- `registry`: the table of all rules
- `conv_matmul`, `embedding`, `recurrent`: operators with weights
- `norm`, `zero_tracking`, `fake_quant`: normalization; where masked units stay zero; quantization
- `elementwise`, `reduction`, `spatial`, `fft`: values combined at a position, along an axis, in
  space
- `movement`, `slice_concat`, `expand_repeat`, `sort_gather`, `unfold`: values moved
- `factory`: constants

A new rule goes into `RULES` of the file of its kind; `registry` merges them.
"""
