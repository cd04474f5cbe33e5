//! Ranks, memory and the right answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::collective::{
    Call, Collective, Communicator, DataType, Factor, Place, RedOp, Settings, group,
};
use beeline::config::SimConfig;
use beeline::core::collective::reduce::Reduction;
use beeline::gpu::{Buffer, Gpu, Stream};

/// Long enough for a busy machine; a test that waits for it fails.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// All ranks of one communicator, driven by one thread.
pub(crate) struct Job {
    pub(crate) comms: Vec<Communicator>,
    pub(crate) streams: Vec<Arc<Stream>>,
    /// Memory of calls is not open to other devices.
    pub(crate) closed: bool,
}

pub(crate) fn gpu() -> Gpu {
    let mut config = SimConfig::default();
    config.memory_bytes = 256 << 20;
    Gpu::simulated(&config).unwrap()
}

/// Devices for `ranks` ranks: those that `BEELINE_TEST_DEVICES` names (`cuda:0,cuda:1`), where they are enough, so that a machine
/// with GPUs runs the same tests on them; simulated ones else.
pub(crate) fn gpus(ranks: u32) -> Vec<Gpu> {
    let named = std::env::var("BEELINE_TEST_DEVICES").unwrap_or_default();
    let names: Vec<&str> = named.split(',').filter(|name| !name.is_empty()).collect();
    if names.len() < ranks as usize {
        return (0..ranks).map(|_| gpu()).collect();
    }
    let open = |name: &&str| Gpu::open(&name.parse().unwrap()).unwrap();
    names.iter().take(ranks as usize).map(open).collect()
}

/// The device of one rank of several that are processes.
pub(crate) fn gpu_of(rank: u32, ranks: u32) -> Gpu {
    gpus(ranks).swap_remove(rank as usize)
}

pub(crate) fn settings(change: impl FnOnce(&mut Settings)) -> Settings {
    let mut settings = Settings::default();
    settings.deadline = LONG;
    change(&mut settings);
    settings
}

impl Job {
    pub(crate) fn new(ranks: u32) -> Self {
        Self::with(ranks, &settings(|_| {}))
    }

    pub(crate) fn with(ranks: u32, settings: &Settings) -> Self {
        Self::of(Communicator::local(&gpus(ranks), settings).unwrap())
    }

    /// On simulated devices, whatever the machine has: their faults are what a test is about.
    pub(crate) fn simulated(ranks: u32, settings: &Settings) -> Self {
        let gpus: Vec<Gpu> = (0..ranks).map(|_| gpu()).collect();
        Self::of(Communicator::local(&gpus, settings).unwrap())
    }

    pub(crate) fn of(comms: Vec<Communicator>) -> Self {
        let streams = comms.iter().map(|comm| Arc::new(comm.gpu().stream().unwrap())).collect();
        Self { comms, streams, closed: false }
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.comms.len() as u32
    }

    /// Waits for all streams, and for no error.
    pub(crate) fn finish(&self) {
        for (comm, stream) in self.comms.iter().zip(&self.streams) {
            stream.synchronize(Instant::now() + LONG).unwrap();
            if let Some(error) = comm.async_error() {
                panic!("{error:#}");
            }
        }
    }

    /// Makes `call` on all ranks with `inputs`, all at byte `shift` of their buffers; the outputs.
    pub(crate) fn run(
        &self,
        call: Call,
        inputs: &[Vec<u8>],
        shift: u64,
        factors: &[[u8; 8]],
    ) -> Vec<Vec<u8>> {
        let ranks = self.ranks();
        let place = |rank: u32, bytes: u64, contents: Option<&[u8]>| {
            let comm = &self.comms[rank as usize];
            let bytes = (bytes + shift).max(1);
            let gpu = comm.gpu();
            let made = if self.closed { gpu.alloc_shareable(bytes) } else { gpu.alloc(bytes) };
            let buffer = made.unwrap();
            if let Some(contents) = contents {
                put(&buffer, shift, contents, &self.streams[rank as usize]);
            }
            buffer
        };
        let buffers: Vec<(Buffer, Buffer)> = (0..ranks)
            .map(|rank| {
                let input = call.input_bytes(rank, ranks).unwrap();
                let output = call.output_bytes(rank, ranks).unwrap();
                let contents = inputs[rank as usize].get(..input as usize);
                (place(rank, input, contents), place(rank, output, None))
            })
            .collect();
        group(|| {
            for (rank, (input, output)) in buffers.iter().enumerate() {
                let factor = factors.get(rank).map(|bytes| Factor::Host(*bytes));
                let (input, output) =
                    (Place::Buffer(input.clone(), shift), Place::Buffer(output.clone(), shift));
                self.comms[rank].call(call, input, output, factor, &self.streams[rank])?;
            }
            Ok(())
        })
        .unwrap();
        self.finish();
        (0..ranks)
            .map(|rank| {
                let bytes = call.output_bytes(rank, ranks).unwrap();
                get(&buffers[rank as usize].1, shift, bytes, &self.streams[rank as usize])
            })
            .collect()
    }

    /// [`Self::run`], compared with the right answer.
    pub(crate) fn check(&self, call: Call, shift: u64) {
        let ranks = self.ranks();
        let inputs = inputs(&call, ranks);
        let factors: Vec<[u8; 8]> = if call.op == RedOp::PRE_MUL_SUM && call.kind.reduces() {
            (0..ranks).map(|rank| noise(8, u64::from(rank) + 77).try_into().unwrap()).collect()
        } else {
            Vec::new()
        };
        let found = self.run(call, &inputs, shift, &factors);
        for (rank, found) in (0..).zip(found) {
            let expected = expected(&call, &inputs, &factors, rank);
            if found != expected {
                let at = found.iter().zip(&expected).position(|(a, b)| a != b);
                panic!(
                    "{call}, {ranks} ranks, shift {shift}: rank {rank} differs from byte {at:?} on"
                );
            }
        }
    }
}

/// Bytes that look like nothing; small exponents, so that sums of floats stay finite.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8 & 0xbf
    };
    (0..len).map(|_| next()).collect()
}

/// Something for every rank to read.
pub(crate) fn inputs(call: &Call, ranks: u32) -> Vec<Vec<u8>> {
    let size = call.dtype.size_bytes().unwrap();
    let bytes = call.count * size * u64::from(call.input_parts(ranks));
    let all = (0..ranks).map(|rank| noise(bytes as usize, u64::from(rank) + 1));
    // A bool is 0 or 1; what others become is not said.
    let only = if call.dtype == DataType::BOOL { 1 } else { 0xff };
    all.map(|bytes| bytes.into_iter().map(|byte| byte & only).collect()).collect()
}

/// What `rank` must have after `call`.
pub(crate) fn expected(call: &Call, inputs: &[Vec<u8>], factors: &[[u8; 8]], rank: u32) -> Vec<u8> {
    let ranks = inputs.len() as u32;
    let part = (call.count * call.dtype.size_bytes().unwrap()) as usize;
    let slice = |of: u32, index: u32| &inputs[of as usize][index as usize * part..][..part];
    let reduced = |index: u32| {
        let all: Vec<&[u8]> = (0..ranks).map(|of| slice(of, index)).collect();
        let mut out = vec![0; part];
        Reduction::new(call.dtype, call.op, ranks).unwrap().run(&all, factors, &mut out);
        out
    };
    let gathered = |index: u32| (0..ranks).flat_map(|of| slice(of, index)).copied().collect();
    let at_root = rank == call.root;
    match call.kind {
        Collective::AllReduce => reduced(0),
        Collective::Reduce if at_root => reduced(0),
        Collective::ReduceScatter => reduced(rank),
        Collective::AllGather => gathered(0),
        Collective::Gather if at_root => gathered(0),
        Collective::AllToAll => gathered(rank),
        Collective::Broadcast => slice(call.root, 0).to_vec(),
        Collective::Scatter => slice(call.root, rank).to_vec(),
        _ => Vec::new(),
    }
}

/// Writes bytes into a buffer.
pub(crate) fn put(buffer: &Buffer, at: u64, bytes: &[u8], stream: &Stream) {
    if bytes.is_empty() {
        return;
    }
    let pinned = buffer.gpu().pin(bytes.len() as u64).unwrap();
    pinned.mem().write(0, bytes).unwrap();
    stream.copy_to_device(buffer, at, &pinned, 0, bytes.len() as u64).unwrap();
    stream.synchronize(Instant::now() + LONG).unwrap();
}

/// Reads bytes out of a buffer.
pub(crate) fn get(buffer: &Buffer, at: u64, len: u64, stream: &Stream) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    if len > 0 {
        let pinned = buffer.gpu().pin(len).unwrap();
        stream.copy_to_host(&pinned, 0, buffer, at, len).unwrap();
        stream.synchronize(Instant::now() + LONG).unwrap();
        pinned.mem().read(0, &mut bytes).unwrap();
    }
    bytes
}

pub(crate) fn all_reduce(count: u64, dtype: DataType) -> Call {
    Call::new(Collective::AllReduce, count, dtype)
}
