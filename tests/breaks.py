"""How the effect of each private part of another package is taken away, and the test that fails then.

python -m tests.breaks FOLDER [WORD]: copies the checkout into FOLDER, runs all those tests there, then breaks one part
after another (of those whose name, file or test has WORD) and runs its test. Prints a line of JSON for each run.
"""

import ast
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.pytest_forks import copy_of_checkout, load_other_packages, start


@dataclass(frozen=True)
class Break:
    # The first name of the part's row in docs/contributing/private-parts.md.
    part: str
    file: str
    # What that file then has in the place of what it has.
    edits: Mapping[str, str]
    # What then fails.
    test: str

    def broken(self, checkout: Path) -> str:
        """The file without the part's effect. Raises ValueError where it does not have what is to be edited."""
        source = (checkout / self.file).read_text(encoding="utf-8")
        for old, new in self.edits.items():
            if source.count(old) != 1:
                raise ValueError(f"{self.file} has {source.count(old)} times: {old}")
            source = source.replace(old, new)
        ast.parse(source)
        return source


BREAKS = [
    Break(
        "torch.utils._pytree",
        "clipscale/step/cache/encoder_io.py",
        {"for leaf in tree_leaves(tree) if": "for leaf in [tree] if"},
        "tests/step/cache/test_encoder_io.py::test_inputs_may_be_nested_and_towers_may_share_an_encoder",
    ),
    Break(
        "torch.utils._pytree",
        "clipscale/tools/plan/memory_tracker.py",
        {"        for leaf in tree_leaves(out):\n": "        for leaf in [out]:\n"},
        "tests/tools/plan/test_memory_tracker.py::test_each_output_of_an_operation_counts",
    ),
    Break(
        "torch.utils._python_dispatch",
        "clipscale/models/flops.py",
        {"        with counter, torch.enable_grad():": "        with torch.enable_grad():"},
        "tests/models/test_flops.py::test_forward_flops_are_the_published_ones",
    ),
    Break(
        "torch.utils._python_dispatch",
        "clipscale/tools/plan/memory_tracker.py",
        {", MemoryTracker() as tracker:\n": ":\n        tracker = MemoryTracker()\n"},
        "tests/tools/plan/test_memory_tracker.py::test_tensors_of_any_size_take_no_memory",
    ),
    Break(
        "torch._dynamo",
        "clipscale/step/compiled.py",
        {"    torch._dynamo.config.recompile_limit = 64\n": ""},
        "tests/step/test_compiled.py::test_every_size_is_compiled_and_a_block_under_ddp_is_one_graph",
    ),
    Break(
        "torch._dynamo",
        "clipscale/step/compiled.py",
        {"    torch._dynamo.config.optimize_ddp = False": "   "},
        "tests/step/test_compiled.py::test_every_size_is_compiled_and_a_block_under_ddp_is_one_graph",
    ),
    Break(
        "Tensor._base",
        "clipscale/step/cache/checks.py",
        {'    factor = getattr(loss.grad_fn, "_saved_other", None)\n': "    factor = None\n"},
        "tests/step/cache/test_mistakes.py::test_a_loss_that_is_scaled_already_is_refused",
    ),
    Break(
        "Tensor._base",
        "clipscale/step/cache/kept_graphs.py",
        {" and not isinstance(tensor._base, nn.Parameter)": ""},
        "tests/step/cache/test_kept_graphs.py::test_a_graphs_bytes_are_without_the_weights_and_without_views_of_them",
    ),
    Break(
        "Tensor._base",
        "clipscale/step/cache/cast_weights.py",
        {"return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)": "return False"},
        "tests/step/cache/test_cast_weights.py::test_a_hook_sees_every_gradient_of_its_weight",
    ),
    Break(
        "Tensor._base",
        "clipscale/step/cache/cast_weights.py",
        {" and zeros._version == version": ""},
        "tests/step/cache/test_cast_weights.py::test_a_gradient_of_zeros_is_one",
    ),
    Break(
        "torch.nn.modules.batchnorm._BatchNorm",
        "clipscale/common/modules.py",
        {"return isinstance(module, _BatchNorm)": "return False"},
        "tests/step/cache/test_chunked_tower.py::test_batch_norm_sees_the_batch_at_once_and_counts_it_once",
    ),
    Break(
        "torch._subclasses",
        "clipscale/tools/plan/memory_tracker.py",
        {"with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker()": "with MemoryTracker()"},
        "tests/tools/plan/test_memory_tracker.py::test_tensors_of_any_size_take_no_memory",
    ),
    Break(
        "torch._subclasses",
        "clipscale/tools/plan/memory_tracker.py",
        {"if func is torch.ops.aten._local_scalar_dense.default and": "if False and"},
        "tests/tools/plan/test_memory_tracker.py::test_a_number_that_is_asked_of_a_tensor_without_values_is_a_constant",
    ),
    Break(
        "DistributedDataParallel.module",
        "clipscale/step/cache/gradient_sync.py",
        {"        return encoder(out)\n": "        return out\n"},
        "tests/test_exactness.py::test_the_step_is_that_of_one_graph",
    ),
    Break(
        "RuntimeError",
        "clipscale/launch/failures.py",
        {"lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_SIGNS)": "lost = False"},
        "tests/launch/test_local.py::test_the_cause_is_shown_and_not_the_ranks_that_it_took_along",
    ),
    Break(
        "torch.distributed.checkpoint",
        "clipscale/checkpoint/loading.py",
        {'"torch.distributed.checkpoint.metadata", ': ""},
        "tests/checkpoint/test_saving_and_loading.py::test_what_is_loaded_is_what_was_saved",
    ),
    Break(
        "torch.distributed.checkpoint",
        "clipscale/checkpoint/loading.py",
        {'        ("torch.serialization", "_get_layout"),\n': ""},
        "tests/checkpoint/test_saving_and_loading.py::test_what_is_loaded_is_what_was_saved",
    ),
    Break(
        "WriteResult.storage_data",
        "clipscale/checkpoint/saving.py",
        {"if isinstance(result, ChecksummedWrite)": "if False"},
        "tests/checkpoint/test_saving_and_loading.py::test_damage_anywhere_in_a_file_of_several_blocks_is_found",
    ),
    Break(
        "open_clip.tokenizer._tokenizer",
        "clipscale/data/tokenizer.py",
        {"else open_clip.tokenizer._tokenizer": "else SimpleTokenizer()"},
        "tests/data/test_tokenizer.py::test_models_of_a_process_share_one_vocabulary",
    ),
    Break(
        "open_clip.tokenizer._tokenizer",
        "clipscale/data/tokenizer.py",
        {"len(self.inner.cache) > WORDS": "False"},
        "tests/data/test_tokenizer.py::test_words_beyond_some_are_not_remembered",
    ),
    Break(
        "get_cast_dtype",
        "clipscale/distributed/weight_types.py",
        {'if hasattr(module, "get_cast_dtype"):': "if False:"},
        "tests/distributed/test_fsdp.py::"
        "test_a_text_tower_of_open_clips_own_casts_alike_before_and_after_its_weights_are_gathered",
    ),
    Break(
        "VisionTransformer",
        "clipscale/models/lean.py",
        {"tokens + self.positional_embedding.to(patches.dtype)": "tokens"},
        "tests/models/test_lean.py::test_every_kind_has_open_clips_features_and_gradients",
    ),
    Break(
        "VisionTransformer",
        "clipscale/models/lean.py",
        {"self.token_embedding(text) + self.positional_embedding[: text.shape[1]]": "self.token_embedding(text)"},
        "tests/models/test_lean.py::test_every_kind_has_open_clips_features_and_gradients",
    ),
    Break(
        "VisionTransformer",
        "clipscale/models/lean.py",
        {"mask = (x != self.config.pad_token_id).long()": "mask = torch.ones_like(x)"},
        "tests/models/test_bert.py::test_a_run_with_bert_is_planned_and_its_features_are_open_clips",
    ),
    Break(
        "VisionTransformer",
        "clipscale/models/lean.py",
        {"x = cross(block(x, True), image, image)": "x = cross(x, image, image)"},
        "tests/models/test_captioner.py::test_loss_and_gradients_are_open_clips",
    ),
    Break(
        "json.detect_encoding",
        "clipscale/common/files.py",
        {"return json.detect_encoding(start)": 'return "utf-8"'},
        "tests/data/test_sample.py::test_captions_are_decoded_by_their_byte_order_mark",
    ),
    Break(
        "json.detect_encoding",
        "clipscale/common/files.py",
        {"return json.detect_encoding(start)": 'return "utf-8"'},
        "tests/data/shards/test_listing.py::test_a_list_is_read_by_its_byte_order_mark",
    ),
    Break(
        "multiprocessing",
        "clipscale/data/loader/workers.py",
        {"Finalize(self, _end, (self._connections, self.processes), exitpriority=10)": "(lambda: None)"},
        "tests/data/loader/test_workers.py::test_a_program_that_leaves_its_stream_open_ends_and_its_workers_too",
    ),
    Break(
        "multiprocessing",
        "clipscale/data/loader/host_batch.py",
        {"(self.layout, DupFd(self._fd))": "(self.layout,)"},
        "tests/data/loader/test_workers.py::test_names_and_texts_that_are_no_utf8_are_read_and_resumed",
    ),
    Break(
        "multiprocessing",
        "clipscale/common/signals.py",
        {"    resource_tracker.ensure_running()  #": "    #"},
        "tests/common/test_signals.py::test_the_tracker_of_semaphores_outlives_signals_to_the_job",
    ),
    Break(
        "multiprocessing",
        "clipscale/data/loader/fork_server.py",
        {"forkserver.ensure_running()": "pass"},
        "tests/data/loader/test_fork_server.py::test_the_server_needs_nothing_heavy_and_any_folder_of_temporary_files",
    ),
    Break(
        "torch.utils.flop_counter.flop_registry",
        "clipscale/models/flops.py",
        {"flop_registry.get(func.overloadpacket)": "None"},
        "tests/models/test_flops.py::test_forward_flops_are_the_published_ones",
    ),
    Break(
        "Muon",
        "clipscale/step/optim.py",
        {'group["lr"] * group["fallback_lr_scale"]': 'group["lr"]'},
        "tests/step/test_optim.py::test_muon_takes_the_steps_of_timms",
    ),
    Break(
        "Muon",
        "clipscale/step/optim.py",
        {'if group.get("use_fallback") and not group["nesterov"]:': 'if not group["nesterov"]:'},
        "tests/step/test_optim.py::test_muon_takes_the_steps_of_timms",
    ),
    Break(
        "Muon",
        "clipscale/step/optim.py",
        {' and not group["nesterov"]:': ":"},
        "tests/step/test_optim.py::test_muon_takes_the_steps_of_timms",
    ),
    Break(
        "Muon",
        "clipscale/step/optim.py",
        {"if func is torch.Tensor.to and": "if func is torch.Tensor.type and"},
        "tests/step/test_optim.py::test_muon_iterates_in_float32_on_a_cpu",
    ),
    Break(
        "hydra.core.override_parser",
        "clipscale/cli/sweep/jobs.py",
        {"if not override.is_sweep_override()": "if True"},
        "tests/cli/sweep/test_run_sweep.py::test_all_combinations_run_in_hydras_order_and_failures_are_named",
    ),
    Break(
        "hydra.core.override_parser",
        "clipscale/cli/words.py",
        {"if sweep and FUNCTION.fullmatch(text):": "if False:"},
        "tests/cli/sweep/test_jobs.py::test_hydra_reads_the_values_of_a_sweeps_word",
    ),
    Break(
        "hydra.core.override_parser",
        "clipscale/cli/compose.py",
        {"Ambiguous value for argument": "Several values of argument"},
        "tests/cli/test_mistakes.py::test_a_mistake_is_answered_in_one_line_that_names_the_remedy",
    ),
    Break(
        "AsyncFileSystem._cat_file",
        "clipscale/data/shards/requests.py",
        {"system._cat_file(path, start=start, end=stop)": "system._cat_file(path, end=stop)"},
        "tests/data/shards/test_remote.py::test_shards_are_listed_indexed_and_read_from_s3",
    ),
    Break(
        "AsyncFileSystem._cat_file",
        "clipscale/data/shards/requests.py",
        {"info = await system._info(path)": 'info = {"size": stop}'},
        "tests/data/shards/test_remote.py::test_shards_are_listed_indexed_and_read_from_s3",
    ),
    Break(
        "AsyncFileSystem._cat_file",
        "clipscale/data/shards/requests.py",
        {"await system.set_session()": "await system.get_client(loop=system.loop)"},
        "tests/data/shards/test_remote.py::test_a_server_elsewhere_gets_no_secret_of_the_user",
    ),
    Break(
        "AsyncFileSystem._cat_file",
        "clipscale/data/shards/requests.py",
        {"allowed(system.kwargs)": "allowed({})"},
        "tests/data/shards/test_remote.py::test_a_server_elsewhere_gets_no_secret_of_the_user",
    ),
    Break(
        "x_disable_meta",
        "clipscale/log/sinks.py",
        {"x_disable_meta=True, ": ""},
        "tests/log/test_metrics.py::test_wandb_offline_needs_no_network_and_goes_on_with_its_run",
    ),
    Break(
        "wandb",
        "clipscale/__main__.py",
        {'sys.modules.setdefault("wandb", None)': "pass"},
        "tests/cli/test_main.py::test_timm_finds_no_wandb_in_the_program",
    ),
    Break(
        "wandb",
        "clipscale/config/libraries.py",
        {"sys.modules[name] = cast(ModuleType, None)": "pass", "del sys.modules[name]": "pass"},
        "tests/config/test_libraries.py"
        "::test_a_package_that_a_model_does_not_need_is_hidden_while_open_clip_is_imported",
    ),
    Break(
        "wandb",
        "clipscale/log/sinks.py",
        {'        del sys.modules["wandb"]\n': "        pass\n"},
        "tests/log/test_metrics.py::test_wandb_is_found_where_the_program_has_hidden_it",
    ),
    Break(
        "optim/_optim_factory.py",
        "clipscale/config/libraries.py",
        {'"optim/_optim_factory.py"': '"optim/factory.py"'},
        "tests/config/test_libraries.py::test_all_names_of_the_libraries_are_found_without_them",
    ),
    Break(
        "optim/_optim_factory.py",
        "clipscale/config/libraries.py",
        {'alone.__path__ = [str(_file("open_clip", ""))]': "alone.__path__ = []"},
        "tests/config/test_libraries.py::test_the_table_of_tags_is_open_clips",
    ),
    Break(
        "optim/_optim_factory.py",
        "clipscale/config/libraries.py",
        {'with hidden_packages("safetensors.torch", "huggingface_hub"):': "with hidden_packages():"},
        "tests/config/test_libraries.py::test_the_table_of_tags_is_read_without_what_fetches_weights",
    ),
    Break(
        "group_parameters",
        "clipscale/models/groups.py",
        {'yield name.removeprefix("trunk."), parameter': "yield name, parameter"},
        "tests/models/test_groups.py::test_groups_are_open_clips_and_timms",
    ),
    Break(
        "TORCHELASTIC_USE_AGENT_STORE",
        "clipscale/distributed/join.py",
        {'os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"': "True"},
        "tests/launch/test_restarts.py::test_a_start_shares_no_key_with_the_one_before_it",
    ),
    Break(
        "H11Protocol",
        "clipscale/tools/explore/connections.py",
        {"if self.cycle is not None:": "if True:"},
        "tests/tools/explore/test_explore.py::test_connections_that_do_not_ask_lock_nobody_out_and_are_closed",
    ),
]


def run(folder: Path, tests: Sequence[str]) -> dict[str, object]:
    """pytest's status and output of these tests in a copy of the checkout."""
    process = start(folder, ["-m", "not slurm", *tests])
    _, status = os.waitpid(process, 0)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what the tests have left
    return {"status": os.waitstatus_to_exitcode(status), "output": (folder / "output.txt").read_text(errors="replace")}


def main(folder: Path, word: str = "") -> None:
    chosen = [each for each in BREAKS if word in f"{each.part} {each.file} {each.test}"]
    if not chosen:
        raise SystemExit(f"no break has {word}")
    tests = sorted({each.test for each in chosen})
    load_other_packages(copy_of_checkout(folder), tests)
    print(json.dumps({"number": None, **run(folder, tests)}), flush=True)
    for each in chosen:
        file = folder / each.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(each.broken(folder), encoding="utf-8")
        print(json.dumps({"number": BREAKS.index(each), **run(folder, [each.test])}), flush=True)
        file.write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
