# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The base of all kernels: raw memory, locks, the key hash, and the words of a table's state block.

[Note: State block]
A table is one int64 array (the header) whose words hold numbers and addresses; the header points to a second array, of
the sub-shards. Kernels get the header's address and read every other address from it, addresses of a sub-shard under
the sub-shard's lock, so that growth by one thread is seen by all and a connection loop compiled by numba can call them
with nothing but numbers. Rows live in chunks of 1024, cut from slabs that are never moved; the index of a sub-shard is
one array of 16-byte entries::

    word 0   the 64 mixed bits of the key (a bijection, so the key itself is not needed to compare)
    word 1   bits  0..31  slot of the row; bit 31: not admitted yet, bits 0..30 count its pushes; all ones: empty
             bits 32..47  day of the last push
             bits 48..62  pushes so far, saturating;  bit 63: the row has its embedx part

Chunks are in one of two tiers: memory, and with rows on disk a mapped file, whose rows are the cold ones. A slot never
changes its tier; a row changes tiers by a change of slot.

A chunk holds 1024 rows, then their statistics (accessors), then their ranks (limits, see [Note: Eviction]). With rows
on disk each row is followed by its own, so that it is in one page.

The place of an entry is proportional to 32 of its hash bits and probing never wraps, so an interval of hashes is an
interval of the index at any capacity: that is what makes walks safe while rows come, go and the index grows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from fleet.ps.table import layout
from fleet.ps.table.hash import MIX_1, MIX_2
from fleet.ps.table.kernels.numba_cache import keep_compiled

# Words of the header.
NUM_WEIGHTS, ROW_BYTES, NUM_COUNTERS, HAS_STATISTICS, NUM_BLOCKS = 0, 1, 2, 3, 4
DRAWS, WHOLE_ROWS, ADMISSION, ADMISSION_ARGUMENT = 5, 6, 7, 8
RANKS_AT, RANKED, ZERO_INIT, DAY, SCALES_BY_SHOW, CREATE_BY_SCORE, FLOATS = 9, 10, 11, 12, 13, 14, 15
BLOCKS, BLOCK_WORDS = 16, 8
SUB_SHARDS, CHUNK_BYTES, SLAB_AT, SLAB_LEFT, SLAB_BYTES, NUM_SLABS, SLABS, SLABS_ROOM = 32, 33, 34, 35, 36, 37, 38, 39
GROUP, FIND, ADMIT, DRAW = 40, 41, 42, 43
TICK = 44  # the rank that pushes write
ROW_STRIDE, STATISTICS_AT, STATISTICS_STRIDE, RANK_STRIDE = 46, 47, 53, 54  # in a chunk
TABLE_LOCK, HEADER_WORDS = 48, 64
# Rows on disk: where the mapping begins and ends (0 without), its next chunk and the bytes left for chunks, rows of it
# used since pages were last unmapped and how many may be, and the most chunks of a sub-shard in memory.
DISK_FROM, DISK_TO, DISK_NEXT, DISK_LEFT, COLD, COLD_LIMIT, MEMORY_CHUNKS = 56, 57, 58, 59, 60, 61, 62
DISK_FILE = 55  # its descriptor
# Words of a block in the header.
UPDATE, COLUMN, WIDTH, STATE, STATE_WIDTH, PARAMS = 0, 1, 2, 3, 4, 5
# The numbers that FLOATS points to: float64, and the seed's mixed bits in the last of them.
INIT_A, INIT_B, NONCLK_COEFF, CLICK_COEFF, EMBEDX_THRESHOLD, INITIAL_STATE = 0, 1, 2, 3, 4, 5
SEED_BASE, NUM_FLOATS = 7, 8
# Words of a sub-shard; its lock stands first.
INDEX, CAPACITY, LENGTH, NUM_ENTRIES, NUM_ROWS = 8, 9, 10, 11, 12
CHUNKS, NUM_CHUNKS, CHUNKS_ROOM, HOT_ROWS, HOT_CHUNKS, LINK = 13, 14, 15, 24, 25, 26
# Of a tier: the next slot of its current chunk and that chunk's end, a list of free slots, one of empty chunks.
NEXT_SLOT, FREE_SLOT, SLOT_END, SPARE_CHUNK, TIER_WORDS, SUB_WORDS = 16, 17, 18, 19, 4, 32
IN_MEMORY, ON_DISK = 0, 1
ASKED, MISSED = 30, 31  # ids of pulls so far, and those that had no row

CHUNK_ROWS, CHUNK_SHIFT, STATISTICS_BYTES = 1024, 10, 24
RANK_BYTES = layout.RANK_BYTES
assert (CHUNK_ROWS, STATISTICS_BYTES) == (layout.CHUNK_ROWS, layout.STATISTICS_BYTES)
# Kinds of ranks: none, the change of the last push, the same below the number of pushes.
UNRANKED, BY_PUSH, BY_COUNT = 0, 1, 2
LOW32, EMPTY = 0xFFFFFFFF, 0xFFFFFFFF
PENDING, PENDING_COUNT = layout.PENDING, layout.PENDING_COUNT
# Flag of a slot that a find returns: the row has its embedx part.
HAS_EMBEDX = 1 << 40
HUGE_PAGE, FIRST_SLAB, LAST_SLAB = 1 << 21, 1 << 20, 1 << 26

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
C_OPTIONS: dict[str, Any] = {"nopython": True, "error_model": "numpy"}
Compile = Callable[[Callable[..., Any]], Any]

# numba's types, which are also its casts.
i64: Any = types.int64
i32: Any = types.int32
u32: Any = types.uint32
u64: Any = types.uint64
f32: Any = types.float32
f64: Any = types.float64
boolean: Any = types.boolean
none: Any = types.void


def _fingerprint() -> str:
    """Returns a checksum of the source of all kernels.

    numba's cache looks at the file of a function alone and would run code compiled against another version of the
    words below. With the checksum in their names, functions of different versions do not meet.
    """
    here = Path(__file__)
    sources = [here.parents[1] / "hash.py", *sorted(here.parent.glob("*.py"))]
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in sources)):08x}"


FINGERPRINT = _fingerprint()


def _stamped(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__qualname__ = f"{function.__qualname__}_{FINGERPRINT}"
    return function


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls: on first use, without the GIL, kept on disk where that is possible."""
    return keep_compiled(njit(**OPTIONS)(_stamped(function)), function)


def part(signature: Any) -> Compile:
    """Compiles a function that only kernels call, for just this signature.

    Without one numba makes a version for each literal argument; without wrappers it compiles twice as fast.
    """
    options = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def compiled(function: Callable[..., Any]) -> Any:
        made = keep_compiled(njit(**options)(_stamped(function)), function)
        made.compile(signature)
        made.disable_compile()
        return made

    return compiled


# For functions that only kernels call, with arguments of the same types: compiled when the first such kernel is.
small_part = kernel


def c_function(signature: Any, **options: Any) -> Compile:
    """Compiles a function that is called by its ``address``."""

    def compiled(function: Callable[..., Any]) -> Any:
        made = keep_compiled(
            CFunc(_stamped(function), (signature.args, signature.return_type), {}, {**C_OPTIONS, **options}), function
        )
        made.compile()
        return made

    return compiled


def _intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


def _pointer_to(element: Any) -> Any:
    @_intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(i64), generate

    return pointer


# The address as a typed pointer: ``words(address)[3]``.
words = _pointer_to(i64)
floats = _pointer_to(f32)
doubles = _pointer_to(f64)
ints = _pointer_to(i32)
uints = _pointer_to(u32)
octets = _pointer_to(types.uint8)


@_intrinsic
def prefetch(typing_context, address):
    """Starts loading the cache line of ``address``."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        octet = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [octet, word, word, word])
        load = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(load, [builder.inttoptr(arguments[0], octet), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return none(i64), generate


@_intrinsic
def copy_line(typing_context, target, source):
    """Copies 64 bytes to ``target``, a multiple of 64, past the caches; others see them after a :func:`fence`."""

    def generate(context, builder, signature, arguments):
        line = ir.VectorType(ir.FloatType(), 16).as_pointer()
        target, source = (builder.inttoptr(address, line) for address in arguments)
        written = builder.store(builder.load(source, align=4), target, align=64)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return none(i64, i64), generate


@_intrinsic
def fence(typing_context):
    """Makes earlier writes visible to other processors before later ones."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return none(), generate


def _indirect(result: Any, *arguments: Any) -> Any:
    """Returns the result of an intrinsic that calls the C function at the address of its first argument.

    [Note: Calls by address]
    A kernel that calls another by name is compiled together with a copy of it, down the whole chain. The parts that
    many kernels share, and those that depend on the configuration, are C functions whose addresses stand in the
    header; each is compiled once, and only when a table needs it.
    """

    def generate(context, builder, signature, values):
        kinds = [context.get_value_type(kind) for kind in (result, *arguments)]
        function = ir.FunctionType(ir.VoidType() if result is none else kinds[0], kinds[1:])
        value = builder.call(builder.inttoptr(values[0], function.as_pointer()), list(values[1:]))
        return context.get_dummy_value() if result is none else value

    return result(i64, *arguments), generate


UPDATE_ARGUMENTS = (i64,) * 10
GROUP_ARGUMENTS = (i64,) * 4
FIND_ARGUMENTS = (i64,) * 13
ADMIT_ARGUMENTS = (i64, i64, i64, i64, i64, f64, i64)
DRAW_ARGUMENTS = (i64, i64, i64)


@_intrinsic
def call_update(typing, function, rows, n, order, gradients, stride, shows, column, width, state, params):
    """Calls an update rule, see :mod:`fleet.ps.table.kernels.rule_kernels`."""
    return _indirect(none, *UPDATE_ARGUMENTS)


@_intrinsic
def call_group(typing, function, table, keys, n, scratch):
    """Calls :func:`fleet.ps.table.kernels.finding.group_keys`."""
    return _indirect(none, *GROUP_ARGUMENTS)


@_intrinsic
def call_find(
    typing, function, table, sub, hashes, order, n, mode, shows, clicks, nonce, slots, line_bytes, data, data_bytes
):
    """Calls :func:`fleet.ps.table.kernels.finding.find_rows`."""
    return _indirect(i64, *FIND_ARGUMENTS)


@_intrinsic
def call_admit(typing, function, table, sub, h, at, mode, score, nonce):
    """Calls :func:`fleet.ps.table.kernels.row_kernels.admit`."""
    return _indirect(i64, *ADMIT_ARGUMENTS)


@_intrinsic
def call_draw(typing, function, numbers, key, column):
    """Calls an initializer of :mod:`fleet.ps.table.kernels.row_kernels`."""
    return _indirect(f64, *DRAW_ARGUMENTS)


# The C library; an address is an int64, and memory is zero-sized never.
allocate_aligned: Any = types.ExternalFunction("aligned_alloc", i64(i64, i64))
release: Any = types.ExternalFunction("free", none(i64))
fill_bytes: Any = types.ExternalFunction("memset", i64(i64, i32, i64))
copy_bytes: Any = types.ExternalFunction("memcpy", i64(i64, i64, i64))
advise: Any = types.ExternalFunction("madvise", i32(i64, i64, i32))
read_file: Any = types.ExternalFunction("pread", i64(i32, i64, i64, i64))
write_file: Any = types.ExternalFunction("pwrite", i64(i32, i64, i64, i64))
lock_mutex: Any = types.ExternalFunction("pthread_mutex_lock", i32(i64))
unlock_mutex: Any = types.ExternalFunction("pthread_mutex_unlock", i32(i64))
create_mutex: Any = types.ExternalFunction("pthread_mutex_init", i32(i64, i64))

UNMAP_PAGES, WILL_NEED = 4, 3  # advice
UNMIX_1, UNMIX_2 = pow(MIX_1, -1, 2**64), pow(MIX_2, -1, 2**64)
_ADVISE_HUGE_PAGES = 14


@part(i64(i64))
def allocate(num_bytes):
    """Returns the address of at least ``num_bytes``, 64-byte aligned, in huge pages where that pays; 0 if none."""
    # Below one huge page nothing is gained, and madvise would cost a system call for each small list.
    if num_bytes < HUGE_PAGE:
        return allocate_aligned(64, (num_bytes + 63) // 64 * 64)
    address = allocate_aligned(HUGE_PAGE, num_bytes)
    if address != 0:
        advise(address, num_bytes, i32(_ADVISE_HUGE_PAGES))
    return address


@part(u64(i64))
def mix(key):
    """Returns the mixed bits of an int64 as uint64."""
    h = u64(key)
    h = (h ^ (h >> u64(33))) * u64(MIX_1)
    h = (h ^ (h >> u64(33))) * u64(MIX_2)
    return h ^ (h >> u64(33))


@part(i64(i64))
def unmix(h):
    """Returns the int64 key whose mixed bits ``h`` are."""
    k = u64(h)
    k = (k ^ (k >> u64(33))) * u64(UNMIX_2)
    k = (k ^ (k >> u64(33))) * u64(UNMIX_1)
    return i64(k ^ (k >> u64(33)))


@part(i64(i64))
def sub_shard_of(h):
    """Returns the sub-shard of mixed bits."""
    return i64((u64(h) >> u64(46)) & u64(63))


@part(i64(i64))
def place_of(h):
    """Returns the 32-bit place of mixed bits."""
    return i64((u64(h) >> u64(14)) & u64(LOW32))
