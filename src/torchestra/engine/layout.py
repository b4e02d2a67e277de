"""The layout of an arena, and of the private context with which a kernel uses it.

An arena is one range of memory that every rank of a group can address (at different addresses, where
ranks are processes)::

    header | control blocks | splits | agreement | records | slots | eager slots | chunk buffers | channels |
    heaps

each but the header and the channels rank by rank.

Who may write what: only the rank itself writes its control block, splits, record, slots and buffers, but for
the word of the control block that waiters count up and down (``WAITERS``); the abort word in the header is
set once, by any rank; the agreement (membership/agreement.py) and the channels (p2p/ring.py) have rules of
their own. A heap is written by its rank, with two exceptions: in an all_reduce or reduce in place
(in_place.py), a peer writes into the tensors between step 1 and its own step 2, and no later than the rank is
told that the operation has ended or failed (reclaiming.py); and what one worker has lent to another
(rpc/shared_buffers.py) is the borrower's until it gives it back.

Who may read what: a peer's slots and chunk buffers in the operation for which they were written, and its
heap between step 1 and step 2 of an operation on it. A rank that was stopped reads later, when the tensor may
be something else already; but only after the group was aborted, so it sees that at its step 2, and fails
(waiting.py).

*Splits* hold how much a rank sends to and expects from each peer in an all_to_all, and where in its own
memory it lies. *Slots* (two a
rank) carry what fits into one piece: the one with the parity of the operation's sequence number. *Eager
slots* (WINDOW a rank) carry the pieces of ranks that do not wait for those who read them (eager.py), and
tables of where the tensors of a list lie (in_place.py). A
*record* holds what its rank did last (recorder.py). *Chunk buffers* (three a rank) carry larger operations
chunk by chunk. The *heap* is a large, sparsely filled range for tensors that the ranks share
(``dist.empty``); all heaps are mapped together, by each rank when it first needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0x7452_4348_4553_5452  # "RTSEHCRt" in memory
VERSION = 17
MEMORY_FILE = "torchestra"  # the prefix of the names of all arenas' memory files
RECORD_VARIABLE = "TORCHESTRA_RECORD"  # names a directory for records of ended arenas (flight_dump.py)
PAGE = 4096
LARGEST_PAGE = 1 << 16  # on any system; a mapping begins at a multiple of a page
LINE = 64

# The header's words, as byte offsets.
HEADER_MAGIC = 0
HEADER_VERSION = 8
HEADER_SIZE = 16
HEADER_SLOT_BYTES = 24
HEADER_CHUNK_BUFFER_BYTES = 32
HEADER_HEAP_BYTES = 40
HEADER_CLOCK = 48  # the clock that all ranks use (clock.py)
HEADER_TICKS = 56  # a moment by that clock
HEADER_NANOSECONDS = 64  # and by CLOCK_MONOTONIC
HEADER_NAME_LENGTH = 72
HEADER_GROUP_SIZE = 80  # how many ranks the group has on all its hosts, or 0 if they are all here
HEADER_HOST_LENGTH = 88
HEADER_ABORT_CLAIM = 120  # ABORT_EXPLAINED or ABORT_WRITTEN once a rank aborts the group
HEADER_ABORT = 128  # 1 when that is written
HEADER_ABORT_LENGTH = 136
HEADER_HOST = 144  # what the group calls this host, if it has several
HEADER_HOST_BYTES = 112
HEADER_NAME = 256  # the group's name
HEADER_NAME_BYTES = 256
HEADER_CHOICES = 512  # a word for each of the group's thresholds (selection.py)
HEADER_ABORT_TEXT = 576
HEADER_BYTES = 16 * PAGE
# For readers outside of the job, in the last page of the header.
OBSERVED = HEADER_BYTES - PAGE
GENERATION = OBSERVED  # how often the group was shrunk or grown; all its ranks write it and the next two:
TIMES_SHRUNK = OBSERVED + 8  # how often it has lost ranks,
TIMES_GROWN = OBSERVED + 16  # and how often others were let in
RECORDS_ASKED = OBSERVED + 24  # counts up when a reader wants to know what other hosts do; readers write it
RECORDS_ANSWERED = OBSERVED + 32  # the value of RECORDS_ASKED that is answered (record_publisher.py),
RECORDS_DESCRIPTOR = OBSERVED + 40  # in this file of the process that is the first rank here
HEARTBEATS_AT = OBSERVED + 64  # by host, what the first rank here has heard from its ranks:
HEARTBEAT_BYTES = 16
HEARTBEAT_COUNT = 0  # how often,
HEARTBEAT_NANOSECONDS = 8  # and when last, by CLOCK_MONOTONIC
HEARTBEAT_HOSTS = (HEADER_BYTES - HEARTBEATS_AT) // HEARTBEAT_BYTES  # of hosts beyond these it is not kept
HEADER_ABORT_TEXT_BYTES = OBSERVED - HEADER_ABORT_TEXT
ABORT_EXPLAINED = 1  # a rank is finding out what to write; another may write instead
ABORT_WRITTEN = 2  # a rank writes, or has written

# A control block's words, as byte offsets.
CONTROL_BYTES = 12288
WAITERS = 128  # how many ranks sleep on a FLAG of this one
STATE = 256  # ABSENT, PRESENT or LEFT
PROCESS = 264  # process id of the rank
STARTED = 272  # when that process started, in clock ticks since boot
PID_NAMESPACE = 288  # the PID namespace that PROCESS is a number of, or 0 if unknown
PROGRAM_TID = 296  # the thread that runs the rank's program: its number in that namespace,
PROGRAM_IDENT = 304  # and what Python calls it
REPORTER_TID = 312  # the thread that answers when ASKED, of ranks that are processes
GROUP_RANK = 280  # what the group calls the rank, where it has more ranks on other hosts; all ranks write it
CORE = 320  # 1 + the core that the rank was last seen on (placement.py)
ABANDONED = 328  # the operation that the rank has left halfway; it begins no other
STACK_SIGNAL = 336  # how others get its stack if it does not answer (diagnosis/stack_dump.py),
STACK_DESCRIPTOR = 344
TOKEN_ADDRESS = 352  # where in the rank's own memory a word is that has the value of
TOKEN = 360  # this one, by which its process is known (single_copy.py)
ASKED = 384  # counts up when a peer wants to know what this rank is doing
ANSWERED = 392  # the value of ASKED that ANSWER answers
CALLED_LENGTH = 400
ANSWER_LENGTH = 408
# Each of the two is written by one thread at a time, so that none is read while another writes it: CALLED by
# the thread that runs an operation, ANSWER by the stack reporter. LAST_SEEN has a checksum.
CALLED = 512  # what the rank called in a mismatch
CALLED_BYTES = 2560
LAST_SEEN = 3072  # where its program was lately (diagnosis/last_seen.py)
LAST_SEEN_BYTES = 1024
ANSWER = 6144  # what its program does (diagnosis/facts.py)
ANSWER_BYTES = 3072

FLAG_LINES = 4096  # a line for each of the last operations: that of number n is line n modulo FLAGS

# A flag line: all that a peer reads of a small operation, in one cache line.
FLAG = 0  # (sequence number << STEP_BITS) + step, only ever grows
META = 8  # what operation (operations.py), and a digest of the thresholds
COUNT = 16  # its size
SHARED = 24  # where in the rank's heap the tensor lies, NOT_SHARED or LISTED; or the first word of
PAYLOAD = 24  # the rank's piece, where all pieces of the operation are that short
PAYLOAD_BYTES = 40
LENDS = 32  # of longer pieces: ABLE or NOT_ABLE if the rank lends its tensor (single_copy.py), else 0
HEAP_START = 40  # the address of its heap, by its own mapping, if the tensor that it lends lies there
ADDRESS = 48  # of that tensor, in its own memory
FLAGS = 32  # a power of two
WINDOW = 16  # how many operations ranks may be apart (waiting.py)

ABLE = 1
NOT_ABLE = 2

ABSENT = 0
PRESENT = 1
LEFT = 2

# A record: totals, the last operations, messages and spans, and a word for every peer. See recorder.py.
TOTAL_BYTES = 0  # of all operations that have ended
TOTAL_WAITED = 8  # ticks, in all operations
WAITING_SINCE = 16  # when the present wait began, or 0
WAITING_FOR = 24
PHASE = 32  # what was waited for last: a value of PROGRESS,
PHASE_PEER = 40  # of this rank,
PHASE_WAITED = 48  # so many ticks, those for other ranks to get there included
LONGEST = 56  # the most of these in the current operation
MESSAGES_OPENED = 64
MESSAGES_BYTES = 72  # sent and received, of all that have ended
MESSAGES_WAITED = 80  # ticks that blocking receives waited for their message
MULTIHOST_NUMBER = 88  # of an operation over several hosts: its number in the group,
MULTIHOST_WAITED = 96  # what TOTAL_WAITED was when it began,
MULTIHOST_BYTES = 104  # and the bytes of all that have ended
REMOTE_MESSAGES_BYTES = 112  # as MESSAGES_BYTES and MESSAGES_WAITED, of messages to and from other hosts
REMOTE_MESSAGES_WAITED = 120
SPANS_OPENED = 128
QUEUED = 136  # operations that were called and are not begun
CALLS_IN_FLIGHT = 144  # of an RPC worker: calls that it waits for,
REFERENCES_OWNED = 152  # remote references whose value it has,
REFERENCES_USED = 160  # and those that it has to values of others
CALLS_MADE = 168
CALLS_SENT_BYTES = 176  # in calls, answers and what belongs to them, to other workers
OPERATIONS_AT = 256
ENTRIES = 256  # a power of two
ENTRY_BYTES = 64
MESSAGES_AT = OPERATIONS_AT + ENTRIES * ENTRY_BYTES
MULTIHOST_AT = MESSAGES_AT + ENTRIES * ENTRY_BYTES
REMOTE_MESSAGES_AT = MULTIHOST_AT + ENTRIES * ENTRY_BYTES
# What all that has ended took, by kind and size class, a tally for each: of what happens within the host, and
# of collectives over several hosts.
TALLIES_AT = REMOTE_MESSAGES_AT + ENTRIES * ENTRY_BYTES
TALLIED_KINDS = 32  # a power of two: as in fingerprints; the last is all kinds above
SIZE_CLASSES = 8  # a power of two; the first five are used
SIZE_CLASS_BOUNDS = (1 << 10, 1 << 16, 1 << 20, 1 << 24)  # bytes: what is above the last is in the fifth
TALLY_BYTES = 32
MULTIHOST_TALLIES_AT = TALLIES_AT + TALLIED_KINDS * SIZE_CLASSES * TALLY_BYTES
SPANS_AT = MULTIHOST_TALLIES_AT + TALLIED_KINDS * SIZE_CLASSES * TALLY_BYTES  # see spans.py
CALLS_AT = SPANS_AT + ENTRIES * ENTRY_BYTES  # that an RPC worker has executed, see rpc/executed_calls.py
CALL_ENTRIES = 64
CALL_BYTES = 128
WAITED_FOR_AT = CALLS_AT + CALL_ENTRIES * CALL_BYTES  # by peer, ticks waited: in collectives, for messages

# An entry of the calls that a worker has executed.
CALL_CALLER = 0  # its number, or -1 where several are counted together
CALL_COUNT = 8  # written last; 0: there is no entry
CALL_NANOSECONDS = 16  # that they took
CALL_NAME_LENGTH = 24
CALL_NAME = 32  # of the function
CALL_NAME_BYTES = 96

# A tally.
TALLY_CALLS = 0
TALLY_MOVED = 8  # bytes
TALLY_TICKS = 16
TALLY_WAITED = 24  # ticks

# An entry of a record.
STAMP = 0  # number of the operation or message, or 0 while the entry is being reused
BEGAN = 8
ENDED = 16  # 0 while it runs, negative when it failed
WHAT = 24  # the fingerprint (operations.py)
AMOUNT = 32  # the count that belongs to it
MOVED_BYTES = 40
WAITED = 48  # ticks
AWAITED = 56  # 1 + the rank that was waited for longest, or 0

# In the entry of a message, WHAT is SENT or RECEIVED, BACKGROUND or 0, and the dtype's code << 16.
SENT = 9
RECEIVED = 10
REMOTE_KINDS = 16  # to be added to both in tallies, for messages to and from other hosts
BACKGROUND = 1 << 8
TAG = AMOUNT
OTHER = AWAITED  # 1 + the rank that it goes to or comes from (of REMOTE_MESSAGES: in the group), 0 if any
# A rank's part of the agreement: words, as byte offsets.
CANDIDATE = 0  # SHRINKS or GROWS while the rank is in shrink() or grow()
READY = 8  # the round whose new group the rank has entered
EXCLUDED = 16  # 1 + the rank that has excluded this one; written by any rank
POLLS = 24  # how often the rank has asked who waits to be let in (pending_joiners.py)
PROPOSALS = 32  # two proposals, by parity of the round: a key, then who goes on
PROPOSAL_KEY_BYTES = 32
PROPOSAL_RANKS = PROPOSAL_KEY_BYTES
SHRINKS = 1
GROWS = 2
WAITING_JOINERS = 8  # beside the word that decides: how many wait to be let in (pending_joiners.py)

STEP_BITS = 24
DIGEST_BIT = 40  # where the digest of the thresholds begins in META, of 22 bits
EAGER = 1 << 62  # in META: a rank that took part did not wait for all others (eager.py)
SLOTS_PER_RANK = 2
EAGER_SLOT_BYTES = 8192
CHUNK_BUFFERS_PER_RANK = 3

# The kernel's private context: words of 8 bytes, as byte offsets.
RANK = 0
SIZE = 8
CONTROL = 16  # address of the control block of rank 0
SPLITS = 24  # address of the splits of rank 0
SLOTS = 32  # address of the slots of rank 0
SLOT_BYTES = 40
CHUNK_BUFFERS = 48  # address of the chunk buffers of rank 0
CHUNK_BUFFER_BYTES = 56
HEAPS = 64  # address of the heap of rank 0, once the heaps are mapped
HEAP_BYTES = 72  # 0 before
ABORT = 80  # address of the header's abort word
SEQUENCE = 88  # of the last operation begun
RESUME = 96  # where to go on in an operation that returned PENDING; 0 or ENTERING at its start
BLOCKED = 104  # the rank waited for when PENDING or ABORTED was returned
SPINS = 112  # how often a wait looks before it yields
YIELDS = 120  # how often it yields before it sleeps, at most
POLL_INTERVAL = (
    128  # address of a struct timespec: how long it sleeps for a message before it returns PENDING
)
STREAM_ABOVE = 136  # an operation on more bytes of a rank's tensors writes results past the caches
DIRECT = 184  # an all_reduce of up to so many bytes has every rank read every tensor
CHUNK = 192  # bytes per chunk of a tensor that goes through the chunk buffers
SHARE = 208  # bytes per chunk where one piece in a buffer is read by everybody
PEER_CHUNK = 200  # bytes per chunk and peer, where a buffer holds one part for each peer
# Tables of SIZE words each, in the same private memory.
POINTERS = 144  # scratch: the sources of a reduction
SOURCES = 152  # by peer: where the piece for it lies
SOURCE_BYTES = 160
TARGETS = 168  # by peer: where its piece goes, or 0 when it is not wanted
TARGET_BYTES = 176
RECORD = 216  # address of this rank's record
CLOCK = 224  # HEADER_CLOCK
TIMESPEC = 232  # scratch, two words
CORES = 248  # how many cores the ranks here may use
MASKS = 256  # address of two affinity masks
UNTIL_REBALANCE = 264  # how many waits that yield until this rank looks where the others are
NEXT_REBALANCE = 272  # how many it will be after the next move
SINGLE_IOVEC = 280  # an iovec (kernels/iovec.py) of one tensor: 0, its elements, its address
THRESHOLDS = 304  # a digest of DIRECT, CHUNK and SHARE, shifted to where META has it
YIELD_TIMESPEC = 320  # scratch of a wait that yields, two words
HOLDS_INTERPRETER = 336  # 1: a wait returns before it yields, as this thread has the interpreter's lock
SEEN = 344  # the last operation that all peers are known to have begun, with fingerprints that fit
DIFFERS = 352  # the operation in which fingerprints do not, when LATE_MISMATCH is returned
EAGER_SLOTS = 360  # address of the eager slots of rank 0
EAGER_BYTES = 368  # rooted operations with pieces of up to so many bytes are those of eager.py
SINGLE_COPY = 376  # pieces of more than so many bytes are read where they lie, if all ranks can
READER = 384  # how this rank reads its peers' memory:
VERDICT = 392  # address of a word of the process: whether it is faster to (single_copy.py)
IOVECS = 400  # scratch: four of struct iovec
FOUND_TOKEN = 464  # scratch
FOUND_BYTES = 472  # scratch
OWN_TOKEN = 480  # what peers find at TOKEN_ADDRESS
LENT = 488  # the last operation in which this rank has lent its tensor
EXTRA_STEP = 496  # 1: the first meeting of the current operation was for nothing but to agree
FILLS = 504  # how many pieces this rank has left in its buffers (buffers.py:fill)
FILL_TICKS = 512  # two words: how long a part of one took by ordinary stores, and past the caches
SLEEP = 528  # address of a struct timespec: how long it sleeps for a collective's peer before it does
CONTEXT_BYTES = 536
UNPROBED = 0  # values of READER: not known yet,
BY_SYSTEM_CALL = 1  # process_vm_readv,
BY_ADDRESS = 2  # all ranks are threads of this process,
CANNOT = 3  # it may not, or would be slower,
REFUSED = 4  # and all ranks know that one of them cannot
MASK_BYTES = 128  # of one affinity mask
TABLES = (POINTERS, SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES)

# A plan: what a kernel knows of a kind of operation on a dtype, words of 8 bytes, as byte offsets.
PLAN_CONTEXT = 0  # address of the kernel's context
PLAN_META = 8  # the fingerprint (operations.py)
PLAN_UNIT = 16  # bytes per element
PLAN_FUNCTION = 24  # address of the reduction (reductions.py)
PLAN_ROOT = 32  # the root, or -1 for all ranks

NOT_SHARED = -(1 << 62)  # SHARED of a tensor that does not lie in the heap,
LISTED = NOT_SHARED + 1  # and of several, which a table in the eager slot tells of (in_place.py)

UNKNOWN = -1  # a count that the ranks need not agree on

# What a kernel returns.
DONE = 0
PENDING = 1
ABORTED = 2
MISMATCH = 3
LATE_MISMATCH = 4  # in an operation that a rank may have left already
UNREADABLE = 5  # the memory of the rank in BLOCKED cannot be read

ENTERING = -1  # RESUME of an operation that waits for peers that are too far behind


def align(number: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``number``."""
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Layout:
    """The offsets of an arena for ``size`` ranks."""

    size: int
    slot_bytes: int
    chunk_buffer_bytes: int
    channel_bytes: int  # of all ranks together
    heap_bytes: int

    @property
    def control(self) -> int:
        return HEADER_BYTES

    @property
    def splits(self) -> int:
        return self.control + self.size * CONTROL_BYTES

    @property
    def splits_bytes(self) -> int:
        """The bytes of one rank's splits: by parity, then sent, expected and where it lies, then by peer."""
        return 2 * 3 * 8 * self.size

    @property
    def agreement(self) -> int:
        return align(self.splits + self.size * self.splits_bytes, LINE)

    @property
    def agreement_bytes(self) -> int:
        """The bytes of one rank's part; the word that decides comes before, in a line of its own."""
        return align(PROPOSALS + 2 * self.proposal_bytes, LINE)

    @property
    def proposal_bytes(self) -> int:
        """The bytes of a proposal: a key, and a bit for each rank."""
        return PROPOSAL_RANKS + 8 * align(self.size, 64) // 64

    @property
    def records(self) -> int:
        return align(self.agreement + LINE + self.size * self.agreement_bytes, PAGE)

    @property
    def record_bytes(self) -> int:
        """The bytes of one rank's record."""
        return align(WAITED_FOR_AT + 16 * self.size, PAGE)

    @property
    def slots(self) -> int:
        return self.records + self.size * self.record_bytes

    @property
    def eager_slots(self) -> int:
        return self.slots + self.size * SLOTS_PER_RANK * self.slot_bytes

    @property
    def chunk_buffers(self) -> int:
        return self.eager_slots + self.size * WINDOW * EAGER_SLOT_BYTES

    @property
    def channels(self) -> int:
        return self.chunk_buffers + self.size * CHUNK_BUFFERS_PER_RANK * self.chunk_buffer_bytes

    @property
    def heaps(self) -> int:
        return align(self.channels + self.channel_bytes, LARGEST_PAGE)

    @property
    def total(self) -> int:
        return self.heaps + self.size * self.heap_bytes
