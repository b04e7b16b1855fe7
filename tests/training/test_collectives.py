"""Tests that collectives are parsed from every form of text in which XLA prints them."""

import jax
import pytest

from tests.training import collectives, compiled

MESH = jax.sharding.AbstractMesh((2, 1, 4, 1), ("data", "fsdp", "context", "tensor"))
Collective = collectives.Collective

LINES = {
    "named mesh": (
        "  %all-reduce.1 = f32[8,64]{1,0} all-reduce(%x), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=1,"
        "'context'=4,'tensor'=1] {'data','context'}, use_global_device_ids=true, to_apply=%add",
        [Collective("all-reduce", ("data", "context"), "f32", (8, 64))],
    ),
    "iota": (
        "  %all-gather.2 = bf16[64,256]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}",
        [Collective("all-gather", ("context",), "bf16", (64, 256))],
    ),
    "transposed iota": (
        "  ROOT %rs = bf16[32]{0} reduce-scatter(bf16[64]{0} %x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
        [Collective("reduce-scatter", ("data",), "bf16", (32,))],
    ),
    "lists": (
        "  %a = s32[] all-reduce(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add",
        [Collective("all-reduce", ("data",), "s32", ())],
    ),
    "no groups": (
        "  %a = f32[] all-reduce(%x), replica_groups={}, to_apply=%add",
        [Collective("all-reduce", ("data", "context"), "f32", ())],
    ),
    "pairs": (
        "  %p = f32[2,40]{1,0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,2},{4,5}}",
        [Collective("collective-permute", ("context",), "f32", (2, 40))],
    ),
    "tuple": (
        "  %a = (bf16[2,8]{1,0}, /*index=1*/f32[4]{0}) all-to-all(%x, %y), replica_groups={{0,1,2,3},{4,5,6,7}}",
        [
            Collective("all-to-all", ("context",), "bf16", (2, 8)),
            Collective("all-to-all", ("context",), "f32", (4,)),
        ],
    ),
    "asynchronous": (
        "  %g = ((f32[16,96]{0,1}), f32[16,768]{0,1}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={1}",
        [Collective("all-gather", ("context",), "f32", (16, 768))],
    ),
    "asynchronous tuple": (
        "  %r = ((bf16[768,12]{1,0}, f32[64]{0}), (bf16[192,12]{1,0}, f32[16]{0})) reduce-scatter-start(%x, %y), "
        "replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add",
        [
            Collective("reduce-scatter", ("context",), "bf16", (192, 12)),
            Collective("reduce-scatter", ("context",), "f32", (16,)),
        ],
    ),
    "asynchronous sum": (
        "  %r = f32[6]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add",
        [Collective("all-reduce", ("data", "context"), "f32", (6,))],
    ),
    "what ends it": ("  %d = f32[16,768]{0,1} all-gather-done(%g)", []),
    "what reads it": ("  %e = f32[8]{0} add(%all-reduce.1, %x), calls=%all-reduce(3)", []),
}


@pytest.mark.parametrize("name", LINES)
def test_each_form_of_text(name):
    line, expected = LINES[name]
    assert collectives.collectives(line, MESH) == expected


LOOP = """HloModule jit_update

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%v), replica_groups=[1,8]<=[8], to_apply=%add
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %w = (s32[], f32[4]{0}) while(%t), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"5"},"x":[]}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%t), condition=%less, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %r = f32[4]{0} all-reduce(%v), replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_loops_count_as_often_as_they_turn():
    assert len(collectives.collectives(LOOP, MESH)) == 3 * 5 + 1


def test_bytes_that_a_ring_sends():
    found = [
        Collective("all-gather", ("context",), "f32", (16,)),
        Collective("reduce-scatter", ("context",), "f32", (4,)),
        Collective("all-reduce", ("data", "context"), "f32", (8,)),
        Collective("collective-permute", ("context",), "f32", (8,)),
    ]
    sent = {x.kind: x.sent for x in compiled.exchanges(found, MESH)}
    assert sent == {"all-gather": 48, "reduce-scatter": 48, "all-reduce": 56, "collective-permute": 32}
