"""Trace a model once, follow every channel, and group channels that are removed together.

- `recorder`: run the model in eval and train mode, and record what rules report
- `tracer`: the dispatch mode: labels follow the data
- `ops`: one rule per ATen operator
- `labels`: which channel every position of a tensor belongs to
- `grouping`: from a recorded trace to groups of channels
- `freeze_reasons`: why channels cannot be removed
- `residual`: residual streams that keep their width
- `producers`, `axis_roles`: what the axes of a weight stand for
- `adapter_labels`: labels through the adapters of an earlier plan
- `cost_model`, `layer_calls`: MACs as a formula of widths; the layers a runtime executes
- `operator_log`: the operators of a pass, to compare two passes
- `shape_inference`: results of heavy operators by shape only
- `names_in_code`, `call_context`: what the model's own code may read
- `repeated_pass`: whether a pass recorded anything new
- `trace_values`: the records of a trace
"""

from fpgm.tracing.grouping import ChannelGroup, Structure, group_channels
from fpgm.tracing.recorder import TraceRecorder, record_trace

__all__ = ["ChannelGroup", "Structure", "TraceRecorder", "group_channels", "record_trace"]
