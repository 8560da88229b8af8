"""Reading compiled programs: small texts as compilers of TPUs and GPUs write them."""

from flaxformer_mt.commands.compiled_text import bytes_of, count_kernels, read_collectives, read_cycles

# A loop of six steps that gathers, a scan of three, a loop of unknown length, and a conditional.
LOOPS = """\
HloModule by_hand, num_partitions=4

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %part = f32[8]{0} get-tuple-element(%c), index=1
  %gather = (f32[8]{0}, f32[32]{0}) all-gather-start(%part), dimensions={0}
  %whole = f32[32]{0} all-gather-done(%gather)
}

%async (p: f32[4]) -> f32[1] {
  ROOT %scatter = f32[1] reduce-scatter(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%apply (p: f32[4]) -> f32[4] {
  ROOT %many = (f32[4], /*index=1*/f32[2]) all-reduce(%p, %q), to_apply=%add
}

%shift (p: f32[4]) -> f32[4] {
  ROOT %shifted = f32[4] collective-permute(%p), source_target_pairs={{0,1}}
}

%below (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[4] {
  %p = f32[8] parameter(0)
  %scan = (s32[], f32[8]{0}) while(%p), condition=%below, body=%shift
  %loop = (s32[], f32[8]{0}) while(%p), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %endless = (s32[], f32[8]{0}) while(%p), condition=%more, body=%shift
  %start = ((f32[4]), f32[1], u32[]) async-start(%x), calls=%async
  %done = f32[1] async-done(%start), calls=%async
  ROOT %if = f32[4] conditional(%which, %x, %x), branch_computations={%skip, %apply}
}
"""


def test_collectives_count_as_often_as_they_run():
    assert read_collectives(LOOPS, times=2) == {
        "all-gather": {"count": 2 * 6, "bytes": 2 * 6 * 128},
        "all-reduce": {"count": 2, "bytes": 2 * 24},  # of two arrays
        "collective-permute": {"count": 2 * 4, "bytes": 2 * 4 * 16},
        "reduce-scatter": {"count": 2, "bytes": 2 * 4},
    }
    assert read_collectives("") == read_collectives("HloModule nothing\n") == {}


def test_a_collective_in_several_fusions_is_one():
    """Told by its channel; where all have the same channel (libtpu 0.0.52), by its chain."""
    text = """\
%start (p: bf16[48,8]) -> bf16[192,8] {
  %all-gather.1 = bf16[192,8]{1,0} all-gather(%p), channel_id=640, dimensions={0}
}

%step (p: bf16[48,8]) -> bf16[192,8] {
  %all-gather.2 = bf16[192,8]{1,0} all-gather(%p), channel_id=640, dimensions={0}
}

%all-reduce-scatter.30 (p: bf16[40]) -> bf16[10] {
  %all-reduce.419 = bf16[40]{0} all-reduce(%p), channel_id=541, to_apply=%add
}

ENTRY %main (p: bf16[48,8]) -> bf16[192,8] {
  %a = bf16[192,8] fusion(%p), kind=kCustom, calls=%start
  %b = bf16[192,8] fusion(%p), kind=kOutput, calls=%step
  %d = bf16[10] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.30
}
"""
    counts = {kind: one["count"] for kind, one in read_collectives(text).items()}
    assert counts == {"all-gather": 1, "reduce-scatter": 1}
    chain = 'channel_id=1, frontend_attributes={chain_id="%d"}'
    chains = text.replace("channel_id=640", chain % 7, 1).replace("channel_id=640", chain % 8)
    assert read_collectives(chains)["all-gather"]["count"] == 2


# As XLA writes a program for an H100, shortened.
FOR_A_GPU = """\
HloModule jit_f, is_scheduled=true

%sliced (p.0: f32[6,2,4], p.1: s32[]) -> f32[2,4] {
  %p.0 = f32[6,2,4]{2,1,0} parameter(0)
  %row = f32[1,2,4]{2,1,0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,2,4}
  ROOT %flat = f32[2,4]{1,0} bitcast(%row)
}

%step (s.1: (s32[], f32[6,2,4])) -> (s32[], f32[6,2,4]) {
  %s.1 = (s32[], f32[6,2,4]{2,1,0}) parameter(0)
  %all = f32[6,2,4]{2,1,0} get-tuple-element(%s.1), index=1
  %loop_fusion.1 = f32[2,4]{1,0} fusion(%all, %i), kind=kLoop, calls=%sliced
  %copy = f32[6,2,4]{2,1,0} copy(%all)
  ROOT %t = (s32[], f32[6,2,4]{2,1,0}) tuple(%i, %copy)
}

ENTRY %main (q: bf16[3,5]) -> f32[3] {
  %q = bf16[3,5]{1,0} parameter(0)
  %attended = (bf16[3,4]{1,0}, u8[8]{0}) custom-call(%q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %known = (s32[], f32[6,2,4]{2,1,0}) while(%w0), condition=%c, body=%step, \
backend_config={"known_trip_count":{"n":"6"}}
  ROOT %unknown = (s32[], f32[6,2,4]{2,1,0}) while(%w0), condition=%c, body=%step
}
"""


def test_the_kernels_of_a_gpu_are_counted_as_often_as_they_run():
    """Those of a call, of six steps of two, and of one step of a loop of unknown length."""
    assert count_kernels(FOR_A_GPU) == 1 + 6 * 2 + 2


def test_cycles_are_those_that_the_compiler_expects():
    text = '{"window_config":{"estimated_cycles":"7632"}}\n backend_config={"estimated_cycles":"10"}'
    assert read_cycles(text) == 7642


def test_bytes_of_types():
    assert bytes_of("(f32[2,3]{1,0:T(8,128)(2,1)}, bf16[4], pred[7], token[])") == 24 + 8 + 7
    assert [bytes_of(one) for one in ("f32[]", "f8e4m3fn[10]", "s32[<=6]", "f32[0,9]")] == [4, 10, 24, 0]
