# SPDX-License-Identifier: Apache-2.0
"""Every feature of the five systems and what amp_ir has for it: the one source of docs/features.md.

`python tests/support/feature_table.py` writes the page; `tests/test_features.py` walks the table.
"""

from __future__ import annotations

from pathlib import Path

import attrs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
SYSTEMS = ("RAF", "apex", "MXNet", "R torch", "torch.amp")
STATUSES = {
    "yes": "there, and the test proves it",
    "other": "reached another way, which the test proves",
    "not yet": "missing, for the reason given",
    "no": "deliberately not built, for the reason given",
}


@attrs.frozen
class Feature:
    """One row. `names` exist below amp_ir; `test` is "file::function", "" where there is none."""

    system: str
    theirs: str
    status: str
    ours: str
    names: tuple[str, ...] = ()
    test: str = ""


def _features(system: str, *rows: tuple[str, str, str, str, str]) -> list[Feature]:
    """Make rows of (theirs, status, ours, names with blanks between, test)."""
    return [
        Feature(system, theirs, status, ours, tuple(names.split()), test)
        for theirs, status, ours, names, test in rows
    ]


_RAF = _features(
    "RAF",
    ("`raf.amp.autocast(model, args)` on the whole training graph", "yes", "`autocast(mod, args)`: backward and optimizer ops have rules too", "autocast compat.raf.autocast", "amp/test_autocast.py::test_matmul_is_low_softmax_is_full_and_the_interface_stays"),
    ("`raf.amp.dtype`", "yes", "`amp_dtype=`, bfloat16 too", "autocast(amp_dtype)", "amp/test_autocast.py::test_every_pair_of_amp_dtype_and_out_dtype_works"),
    ("`raf.amp.out_dtype`", "yes", "`out_dtype=`", "autocast(out_dtype)", "amp/test_autocast.py::test_results_take_out_dtype"),
    ("`CustomTypeHint({op: rule})`", "yes", "the same, in its thread only", "CustomTypeHint", "amp/test_autocast.py::test_custom_hints_nest_survive_exceptions_and_stay_in_their_thread"),
    ("rules `rule(args, ret_type, amp_dtype)`", "yes", "the same signature and hints", "amp.PrimType amp.TupleType", "amp/test_autocast.py::test_the_rules_of_rafs_document_work_with_our_names"),
    ("`register_op_cast_rule`", "yes", "`amp.type_hint`; a second rule for an op is an error", "amp.type_hint", "amp/test_hints.py::test_a_second_rule_names_the_first"),
    ("`generic_cast`, `gen_hint_helper`, `check_dtype`", "yes", "`amp.hint_for_floats`, `amp.check_dtype`", "amp.hint_for_floats amp.check_dtype", "amp/test_hints.py::test_the_helper_asks_for_floats_one_by_one"),
    ("`infer_cast` (majority)", "other", "`FREE`: a minimum cut decides", "amp.FREE", "amp/test_placement.py::test_on_programs_the_cut_is_never_above_greedy"),
    ("a missing rule fails with every op listed", "yes", "the same", "errors.RuleError", "amp/test_autocast.py::test_ops_without_a_rule_are_listed_together"),
    ("casts reused, and undone where the source is there", "yes", "one cast for a value and dtype", "", "amp/test_raf_cases.py::test_cast_reuse"),
    ("existing casts folded", "yes", "the same", "", "amp/test_raf_cases.py::test_existing_cast_with_always_op"),
    ("number of casts as a test", "yes", "RAF's graphs, with our counts", "", "amp/test_raf_cases.py::test_basic"),
    ("updated weights stay float32 (`may_share`)", "yes", "state keeps its dtype", "", "amp/test_autocast_workloads.py::test_state_keeps_its_dtype_and_only_results_take_out_dtype"),
    ("`append_loss_n_optimizer`", "yes", "`compat.raf`; else write the step in PyTorch", "compat.raf.append_loss_n_optimizer trace_step", "test_readme.py::test_the_examples_of_a_page_run"),
    ("`profile_vm_model`", "yes", "the same", "profile_vm_model", "end_to_end/test_pipeline.py::test_profiling_changes_nothing_and_gives_an_entry_a_repeat"),
    ("`profile_vm_model(disable_fusion=)`", "yes", "the same", "profile_vm_model(disable_fusion)", "memory/test_static_reports.py::test_without_fusion_a_step_computes_the_same"),
    ("profiler of kernels, chrome trace", "yes", "`profile_kernels`, `save_trace`", "profile_kernels KernelProfile.save_trace", "report/test_profile_kernels.py::test_the_trace_has_an_event_a_call_and_a_counter"),
    ("op profiler: latency, workspace", "yes", "`profile_kernels` and `memory_report` call by call", "profile_kernels memory_report", "memory/test_memory_report.py::test_workspace_of_the_library_is_counted"),
    ("`get_peak_memory`", "yes", "the same", "get_peak_memory", "end_to_end/test_pipeline.py::test_peak_memory_is_the_plan_and_parameters_can_be_left_out"),
    ("`trace_memory`", "yes", "the same", "trace_memory compat.raf.trace_memory", "memory/test_static_reports.py::test_the_trace_of_memory_has_every_call_and_its_largest_entry_is_the_peak"),
    ("`calc_model_gflops`", "yes", "`get_gflops`", "get_gflops compat.raf.calc_model_gflops", "memory/test_static_reports.py::test_the_arithmetic_of_three_layers_is_that_of_their_matmuls_and_little_more"),
    ("`get_param_size`", "yes", "the same", "get_param_size", "memory/test_static_reports.py::test_the_size_of_parameters_has_a_tied_one_once"),
    ("memory profiler: used, allocated", "yes", "the plan's bytes are those that the system gives", "memory_report", "memory/test_memory_report.py::test_planned_bytes_are_what_the_system_really_gives"),
    ("rematerialisation, `raf.memory_budget`", "yes", "`memory_budget=`", "compile(memory_budget) jit(memory_budget) compile(recompute) jit(recompute)", "memory/test_rematerialize.py::test_a_budget_is_held_and_changes_no_bit"),
    ("memory pools", "other", "one arena with planned offsets", "", "memory/test_memory_plan.py::test_live_tensors_never_share_a_byte"),
    ("control flow, closures", "no", "a branch on data is refused with its line: the program is straight", "errors.CaptureError", "capture/test_trace_diagnostics.py::test_every_read_of_a_value_is_listed_at_once"),
)  # fmt: skip

_APEX = _features(
    "apex",
    ("`amp.init(enabled, loss_scale, verbose)`", "yes", "`compat.apex.init`", "compat.apex.init(enabled) compat.apex.init(loss_scale)", "compat/test_compat.py::test_a_handle_that_is_not_enabled_changes_nothing"),
    ("`enable_caching`", "other", "accepted; a step casts a weight once for all readers", "compat.apex.init(enable_caching)", "amp/test_autocast.py::test_a_weight_and_its_transpose_share_one_cast"),
    ("`verbose` prints every cast", "yes", "`autocast(verbose=True)`, `jit(verbose=True)`, by module path", "autocast(verbose) jit(verbose) CastPlan.list_casts", "compat/test_compat.py::test_verbose_prints_every_cast_by_the_path_of_its_module"),
    ("`handle.scale_loss(loss, optimizer)`", "yes", "`scale_loss`, in `jit` without naming the scaler again", "scale_loss compat.apex.AmpHandle.scale_loss", "loss_scaling/test_scale_loss.py::test_a_compiled_step_makes_the_scalers_that_no_one_named"),
    ("`wrap_optimizer(optimizer, num_loss)`", "yes", "the same", "compat.apex.AmpHandle.wrap_optimizer compat.apex.OptimWrapper.scale_loss", "compat/test_compat.py::test_more_losses_than_the_optimizer_was_wrapped_for_are_refused"),
    ("a scaler for each loss; any overflow skips", "yes", "`loss_id=`", "scale_loss(loss_id)", "loss_scaling/test_scale_loss.py::test_the_loop_trains_as_without_scaling_and_skips_overflows"),
    ("several optimizers, each with its scaler", "yes", "the same", "scale_loss", "loss_scaling/test_scale_loss.py::test_each_of_two_optimizers_gets_a_scaler_of_its_own"),
    ("`delay_unscale`", "yes", "the same", "scale_loss(delay_unscale)", "loss_scaling/test_scale_loss.py::test_the_loop_trains_as_without_scaling_and_skips_overflows"),
    ("static `loss_scale`", "yes", "`GradScaler(dynamic=False)`", "GradScaler(dynamic)", "loss_scaling/test_grad_scaler.py::test_a_static_scale_skips_and_stays"),
    ("`min_loss_scale`, `max_loss_scale`", "yes", "`min_scale=`, `max_scale=`", "GradScaler(min_scale) GradScaler(max_scale)", "loss_scaling/test_grad_scaler.py::test_the_scale_stays_within_its_limits"),
    ("`amp.state_dict`, `load_state_dict`", "yes", "the scaler's, and checkpoints", "GradScaler.state_dict save_checkpoint", "loss_scaling/test_grad_scaler.py::test_states_load_into_each_other"),
    ("`@amp.half_function`, `float_function`, `promote_function`", "yes", "the same, in a captured step and its backward", "half_function float_function promote_function", "amp/test_annotations.py::test_a_half_function_is_low_in_both_passes"),
    ("`amp.register_half_function` and its siblings", "yes", "the same; PyTorch itself is patched while a step is captured only", "register_half_function register_float_function register_promote_function", "amp/test_annotations.py::test_a_registered_function_is_annotated_while_a_step_is_captured"),
    ("RNN cells and layers", "yes", "one call on CPUs for a layer, and for a loop over cells; packed lengths are data", "", "capture/test_recurrent_layers.py::test_bfloat16_trains_as_float32"),
    ("O0, O1", "yes", "`amp_dtype=None`, `amp_dtype=\"float16\"`", "jit(amp_dtype)", "end_to_end/test_models.py::test_float16_runs_and_stays_close"),
    ("O2: float32 master weights, BatchNorm in float32", "other", "always: state keeps its dtype, statistics are float32", "", "amp/test_autocast.py::test_statistics_of_a_normalization_stay_float32"),
    ("O3: pure float16", "yes", "`model.half()`: a model in float16 is captured as it is, without casts", "jit", "end_to_end/test_low_models.py::test_a_low_model_trains_as_in_pytorch"),
    ("`amp.master_params`, clipping after the block", "yes", "`model.parameters()`; a wrong place is an error", "errors.LossScaleError", "loss_scaling/test_scale_degree_recipes.py::test_clipping_belongs_behind_the_block"),
    ("`amp.disable_casts()`", "yes", "`autocast_off()`", "autocast_off", "amp/test_autocast_workloads.py::test_autocast_off_leaves_a_region_as_it_is_backward_included"),
    ("banned: binary cross entropy", "other", "computed in float32, as PyTorch's CPU list does", "", "amp/test_type_hints.py::test_the_policy"),
    ("forcing a layer to a type (announced, never shipped)", "yes", "`Override(module=, op=, phase=)`", "Override", "amp/test_overrides.py::test_a_selector_selects"),
    ("`run_amp_numerical_checks` (unmerged)", "yes", "`verify`: gradients and updates by parameter, against float64 and beside PyTorch", "verify(amp_dtype)", "verification/test_verify.py::test_a_right_step_is_good"),
    ("patching of eager PyTorch", "no", "a compiled step changes nothing outside of it", "", "capture/test_trace_unchanged.py::test_nothing_is_changed_by_a_capture"),
)  # fmt: skip

_MXNET = _features(
    "MXNet",
    ("`amp.init(target_dtype)`", "yes", "`compat.mxnet.init`; may be called again", "compat.mxnet.init(target_dtype)", "compat/test_compat.py::test_ops_are_chosen_by_mxnets_names"),
    ("`target_precision_ops`, `fp32_ops`", "yes", "the same; `overrides=`", "compat.mxnet.init(fp32_ops) jit(overrides)", "compat/test_compat.py::test_ops_are_chosen_by_mxnets_names"),
    ("an op in two lists is an error", "yes", "the same", "compat.mxnet.init", "compat/test_compat.py::test_wrong_uses_of_mxnets_names"),
    ("`conditional_fp32_ops`", "other", "a rule reads the op's arguments", "CustomTypeHint", "amp/test_autocast.py::test_a_constant_that_low_cannot_hold_keeps_its_op_in_float32"),
    ("`excluded_sym_names`", "yes", "`excluded_names=`, `Override(module=)`; one that selects nothing is an error", "Override convert_model(excluded_names)", "amp/test_overrides.py::test_a_selector_that_selects_nothing_names_what_is_near"),
    ("`convert_model`, `convert_hybrid_block`", "yes", "`convert_model`", "convert_model compat.mxnet.convert_model", "inference/test_convert_model.py::test_numbers_dtypes_and_the_model_itself"),
    ("`convert_model` with `target_dtype_ops`, `fp32_ops`, `conditional_fp32_ops`", "yes", "the same", "convert_model(target_dtype_ops) convert_model(fp32_ops) convert_model(conditional_fp32_ops)", "inference/test_convert_model.py::test_lists_decide"),
    ("`cast_optional_params`", "yes", "the same", "convert_model(cast_optional_params)", "inference/test_convert_model.py::test_weights_are_stored_low_once"),
    ("saving with `remove_amp_cast`", "yes", "the same", "save", "inference/test_model_file.py::test_removed_casts_leave_the_float32_model"),
    ("`init_trainer`, `trainer.step`", "yes", "the same", "compat.mxnet.init_trainer compat.mxnet.Trainer.step", "compat/test_compat.py::test_a_trainer_steps_with_the_mean_of_a_batch_and_clips_behind_unscale"),
    ("`scale_loss(loss, trainer)`", "yes", "the same", "compat.mxnet.scale_loss", "compat/test_compat.py::test_ssd_trains_twenty_steps_with_mxnets_loop_as_pytorch_does"),
    ("`unscale(trainer)`", "yes", "the same", "compat.mxnet.unscale", "compat/test_compat.py::test_a_trainer_steps_with_the_mean_of_a_batch_and_clips_behind_unscale"),
    ("`trainer.amp_loss_scale`", "yes", "the same", "compat.mxnet.Trainer.amp_loss_scale", "compat/test_compat.py::test_a_trainer_steps_with_the_mean_of_a_batch_and_clips_behind_unscale"),
    ("hybridized execution under a dynamic scale (theirs cannot)", "yes", "`hybridize`", "compat.mxnet.hybridize", "compat/test_compat.py::test_a_trainer_steps_with_the_mean_of_a_batch_and_clips_behind_unscale"),
    ("`list_lp16_ops`, `list_fp32_ops`, `list_lp16_fp32_ops`", "yes", "the same; `list_ops`", "compat.mxnet.list_lp16_ops compat.mxnet.list_fp32_ops compat.mxnet.list_lp16_fp32_ops list_ops", "amp/test_overrides.py::test_the_lists_of_a_policy_hold_every_op_once"),
    ("`list_widest_type_cast`, `list_conditional_fp32_ops`", "no", "free ops are decided by cost, and rules are functions: there are no such lists", "", ""),
    ("every registered op is on a list (`test_amp_coverage`)", "yes", "every op has a rule", "", "amp/test_type_hints.py::test_every_op_of_the_dialect_has_a_rule"),
    ("result independent of the order of visits", "yes", "the same", "", "amp/test_placement.py::test_the_order_of_visits_has_no_influence"),
    ("outputs keep their dtypes", "yes", "the same", "", "amp/test_autocast.py::test_gradients_of_parameters_leave_in_float32"),
    ("`multi_precision=True` optimizers", "other", "parameters and moments are float32", "", "amp/test_autocast_workloads.py::test_state_keeps_its_dtype_and_only_results_take_out_dtype"),
    ("`MXNET_SAFE_ACCUMULATION`", "yes", "always: sums accumulate float32", "", "amp/test_type_hints.py::test_products_read_low_accumulate_float32_and_keep_gradients"),
    ("no scaler state save (#16858)", "yes", "`GradScaler.state_dict`", "GradScaler.state_dict", "runtime/test_checkpoint.py::test_a_run_goes_on_bit_for_bit"),
)  # fmt: skip

_R = _features(
    "R torch",
    ("`with_autocast(device_type, dtype, enabled)`", "yes", "`compat.r_torch.with_autocast`", "compat.r_torch.with_autocast", "compat/test_compat.py::test_the_four_runs_of_rs_document_are_those_of_pytorch"),
    ("`local_autocast`", "other", "`with_autocast` as a decorator", "compat.r_torch.with_autocast", "capture/test_autocast_regions.py::test_a_region_without_autocast_computes_as_in_pytorch"),
    ("`set_autocast`, `unset_autocast`", "yes", "the same; the cache is restored", "compat.r_torch.set_autocast compat.r_torch.unset_autocast", "compat/test_compat.py::test_a_region_of_r_torch_ends_with_everything_as_it_was"),
    ("`cuda_amp_grad_scaler`", "yes", "the same, on CPUs too", "compat.r_torch.cuda_amp_grad_scaler", "compat/test_compat.py::test_the_four_runs_of_rs_document_are_those_of_pytorch"),
    ("`enabled=FALSE` of either", "yes", "a disabled scaler leaves no op", "", "loss_scaling/test_loss_scale_steps.py::test_a_disabled_scaler_leaves_no_trace"),
    ("two reads of the host a step", "other", "none", "", "end_to_end/test_gpu_steps.py::test_the_host_waits_for_nothing_in_a_replayed_step"),
)  # fmt: skip

_TORCH = _features(
    "torch.amp",
    ("`torch.autocast` regions and decorator", "yes", "captured as written", "", "end_to_end/test_models.py::test_the_users_autocast_region_rounds_where_eager_does"),
    ("`enabled=False` regions", "yes", "left alone, backward too; `autocast_off`", "autocast_off", "capture/test_autocast_regions.py::test_nothing_of_a_region_without_autocast_is_low"),
    ("autocast is thread-local", "yes", "captures and hints are too", "", "capture/test_threads.py::test_another_thread_sees_nothing_of_a_capture"),
    ("weight cache", "other", "one cast a weight and step, never stale", "", "amp/test_autocast.py::test_a_weight_and_its_transpose_share_one_cast"),
    ("`custom_fwd`, `custom_bwd`", "yes", "captured", "", "capture/test_autocast_regions.py::test_a_region_without_autocast_computes_as_in_pytorch"),
    ("`torch.library` custom ops", "yes", "one call of the op in the compiled step, with its fake and autograd", "", "end_to_end/test_custom_ops.py::test_an_op_in_python_with_its_autograd"),
    ("`torch.library.register_autocast`", "yes", "followed, for float32 and the step's low dtype", "", "end_to_end/test_custom_ops.py::test_a_registered_autocast_decides_and_an_unannotated_op_is_left"),
    ("op lists of CUDA", "yes", "`policy=\"torch\"`", "autocast(policy) jit(policy)", "amp/test_overrides.py::test_where_the_policies_differ"),
    ("`GradScaler`: methods and defaults", "yes", "the same; a `torch.amp.GradScaler` works too", "GradScaler", "loss_scaling/test_grad_scaler.py::test_defaults_are_those_of_pytorch"),
    ("sequence of scales", "yes", "bit-identical", "GradScaler.update", "loss_scaling/test_grad_scaler.py::test_the_sequence_of_scales_is_that_of_pytorch"),
    ("`unscale_` before clipping", "yes", "the same; forgetting it is an error at capture", "GradScaler.unscale_ errors.LossScaleError", "loss_scaling/test_scale_degree.py::test_a_wrong_program_is_refused_at_its_line"),
    ("`update(new_scale)`", "yes", "the same, powers of two", "GradScaler.update", "loss_scaling/test_steps_beside_a_scaler.py::test_a_new_scale_is_taken_and_a_skipped_step_is_still_skipped"),
    ("getters and setters", "yes", "the same; a change captures again", "GradScaler.set_growth_factor GradScaler.get_scale", "loss_scaling/test_loss_scale_steps.py::test_changed_options_of_a_scaler_capture_again"),
    ("`state_dict`, `load_state_dict`", "yes", "the same", "GradScaler.state_dict GradScaler.load_state_dict", "loss_scaling/test_grad_scaler.py::test_states_load_into_each_other"),
    ("errors: unscaled twice, step twice, float16 gradients", "yes", "the same", "", "loss_scaling/test_grad_scaler.py::test_pytorchs_own_errors"),
    ("gradient accumulation", "yes", "the same loop", "", "loss_scaling/test_loss_scale_steps.py::test_accumulation_keeps_the_scale_and_skips_the_effective_batch_once"),
    ("gradient penalty", "yes", "the same loop", "", "loss_scaling/test_scale_loss.py::test_a_gradient_penalty_as_in_pytorchs_note"),
    ("several models, losses, optimizers", "yes", "the same loop", "", "loss_scaling/test_scale_degree.py::test_two_models_losses_and_optimizers_share_a_scaler"),
    ("was the step skipped? (#67590)", "yes", "`train.skipped`, `train.last`", "CompiledStep.skipped CompiledStep.last", "loss_scaling/test_scale_degree.py::test_a_jit_step_says_what_became_of_its_last_run"),
    ("DistributedDataParallel", "yes", "recognised in `model=`; or `data_parallel=True` for a plain model; on CPUs with gloo", "jit(data_parallel) jit(comm_dtype)", "distributed/test_training.py::test_ranks_stay_equal_and_follow_pytorch"),
    ("ZeroRedundancyOptimizer", "other", "`jit(..., data_parallel=True, shard=\"optimizer\")`, or `\"gradients\"`, splits any elementwise optimizer", "jit(shard) gather_state_dict", "distributed/test_shards.py::test_split_state_trains_as_whole_state"),
    ("FSDP, DataParallel", "not yet", "refused, with what to use", "errors.ArgumentError", "runtime/test_processes.py::test_other_wrappers_are_refused_with_what_to_use"),
    ("sparse gradients", "no", "refused with the reason", "errors.CaptureError", "end_to_end/test_wrong_uses.py::test_wrong_uses"),
)  # fmt: skip

FEATURES = [*_RAF, *_APEX, *_MXNET, *_R, *_TORCH]


def page() -> str:
    """Return the text of docs/features.md."""
    counts = {one: sum(row.status == one for row in FEATURES) for one in STATUSES}
    lines = [
        "# Features of five systems, and ours",
        "",
        "Every feature of RAF, apex, MXNet's AMP, R torch and torch.amp that their users see, what",
        "amp_ir has for it, and the test that proves it. The page is written from",
        "`tests/support/feature_table.py`, which `tests/test_features.py` walks.",
        "Pages for each: [RAF](coming_from_raf.md), [apex](coming_from_apex.md),",
        "[MXNet](coming_from_mxnet.md), [R torch](coming_from_r_torch.md),",
        "[torch.amp](coming_from_torch_amp.md).",
        "",
        *(f"- {name} ({counts[name]}): {what}" for name, what in STATUSES.items()),
    ]
    for system in SYSTEMS:
        lines += ["", f"## {system}", "", "| theirs | | ours | test |", "|---|---|---|---|"]
        for one in FEATURES:
            if one.system == system:
                file, _, name = one.test.partition("::")
                link = f"[{name.removeprefix('test_')}](../tests/{file})" if one.test else ""
                lines.append(f"| {one.theirs} | {one.status} | {one.ours} | {link} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
