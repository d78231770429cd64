"""Shared helpers. Nothing here knows about plans or tracing; import the module that you need.

- Models and tensors: `modules`, `copying`, `hooks`, `preserve_state`, `outputs`, `example_inputs`,
  `calibration_data`, `weight_norm`, `weight_hooks`, `kept_weights`, `parameter_roles`,
  `size_names`, `adapter_spec`, `channel_adapters`
- Numbers: `distances`, `precision`, `denormals`, `rng`, `accuracy`, `training_loop`, `timing`
- Processes and threads: `distributed`, `file_lock`, `thread_lock`, `machine_load`
- Files: `atomic_io`, `replace_files`, `safe_read`, `run_files`, `safetensors_io`, `plain_json`,
  `typed_json`
- Text: `text`, `tables`, `html_table`, `tracebacks`, `keywords`, `progress`
- Imports: `lazy_exports`
"""
