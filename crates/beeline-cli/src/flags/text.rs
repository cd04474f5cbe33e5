//! What the help says around the table of flags.

pub(super) const ABOUT: &str = "Move bytes on the straightest line between files and GPU memory";

pub(super) const LONG_ABOUT: &str = "\
Move bytes on the straightest line between files and GPU memory.

Beeline loads models (safetensors) into GPU memory, copies files through it, and says which way the \
bytes went. For every transfer it plans: which routes does this machine allow between the file and the \
device (out of the page cache, past it with O_DIRECT, mapped), and why not the others? Then it picks \
one for each piece of the file by where that piece is right now. `beeline explain` shows the plan, and \
every transfer reports the routes that were really taken, and their cost.

On a machine without a GPU the device is sim:0, a SIMULATED one: device memory is host memory, copies \
are made by threads. Files, plans, errors and verification are the real ones; the speed is not that of a \
GPU. Every output of a simulated device says \"simulated\". A machine that has an NVIDIA GPU whose \
driver does not work is an error, never a silent simulation.";

pub(super) const AFTER_HELP: &str = "\
Examples:
  beeline load model.safetensors --verify      load a model and compare it with its file
  beeline load llama/ --rank 0 --of 2          load the share of one tensor-parallel rank
  beeline explain model.safetensors            which way would the bytes go, and why?
  beeline explain allreduce --ranks 8 --bytes 64M   which algorithm, over which links, how long?
  beeline copy big.bin /mnt/backup/            file -> device -> file, replaced in one step

Exit codes:
  0    done
  1    failed: a file is missing, a device is full, a tensor differs, no route is open, a client of
       `rdma serve` failed, ...
  2    refused: a wrong command line, or an input that no retry makes acceptable
  130  ended by SIGINT (143 by SIGTERM, 129 by SIGHUP); another one (a SIGHUP: a second later) exits
       at once, without cleaning up

Environment (flags win; a number outside of its bounds is named, and the nearest within is used;
what is no number, or none of 64 bits, is named and left out):
  BEELINE_POOL_BYTES     most pinned host memory in use at once, at least 8M (256M)
  BEELINE_THREADS        threads that read, write and start copies, 1 to 256 (one per CPU, 2 to 12)
  BEELINE_CHUNK_BYTES    one read and one copy, 64K to 4M, a power of two (4M)
  BEELINE_QUEUE_DEPTH    direct reads in flight, 1 to 1024 (32)
  BEELINE_STAGE_SLOTS, BEELINE_STAGE_SLOT_BYTES
                         staging memory of a local link to GPU memory that cannot be shared:
                         2 to 64 slots (8) of 256K to 4M, a power of two (2M)
  BEELINE_STALL_SECONDS  give up a transfer that finishes nothing for so long, 1 to 86400 (60)
  BEELINE_IO_URING       0 forbids io_uring
  BEELINE_LOG            messages of the drop-in libraries: error, warn, info, debug
  BEELINE_CUFILE_STATS   folder where it leaves statistics for `beeline cufile stats`
  BEELINE_CUFILE_WAIT    how it waits for copies: driver, word, event
  BEELINE_CUFILE_VERSION version it reports, as 1200
  BEELINE_SIM_DEVICES    number of simulated devices, 1 to 64 (1)
  BEELINE_SIM_MEMORY     memory of each simulated device (16G)
  BEELINE_SIM_PROFILE    what a simulated device shows of its memory: plain, bar, movable
  BEELINE_COMM_TIMEOUT   seconds that a collective waits for a missing rank, 1 to 86400 (30)
  BEELINE_COMM_PATH      staged: collectives go through host memory, auto: as planned (auto)
  BEELINE_COMM_EARLY     0: kernels of collectives start when what was queued before has ended,
                         also where they could wait for that themselves (1)
  BEELINE_COMM_STRAIGHT  1: large parts of collectives go straight into registered memory of
                         other ranks (0)
  BEELINE_COMM_COPY_ENGINE_BYTES
                         from so many bytes to one device on, copies carry what is only moved, where
                         one group has the calls of all ranks (128M)
  BEELINE_COMM_CHUNK_BYTES  shared memory of a rank on the staged path, 64K to 16M (1M)
  BEELINE_COMM_SECRET    what the processes of a torchrun job know and nobody else does
  BEELINE_HOST_ID        the name of this host, where its boot identifier does not tell hosts apart";
