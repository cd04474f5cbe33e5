//! Collectives, sends and receives.

use beeline::collective::{Call, Collective, DataType, Factor, Place, RedOp};
use beeline::core::addr::DevicePtr;

use crate::abi::{Address, export};
use crate::comm::{Comm, Handle, lock};
use crate::failure::Failure;
use crate::group;

/// A call as it came in.
struct Raw {
    kind: Collective,
    input: Address,
    output: Address,
    count: usize,
    dtype: i32,
    op: i32,
    root: i32,
}

impl Raw {
    const fn new(
        kind: Collective,
        input: Address,
        output: Address,
        count: usize,
        dtype: i32,
    ) -> Self {
        Self { kind, input, output, count, dtype, op: 0, root: 0 }
    }

    const fn op(self, op: i32) -> Self {
        Self { op, ..self }
    }

    const fn root(self, root: i32) -> Self {
        Self { root, ..self }
    }

    fn queue(self, comm: Handle, stream: Address) -> Result<(), Failure> {
        self.post(comm, stream).map_err(group::refused)
    }

    fn post(self, comm: Handle, stream: Address) -> Result<(), Failure> {
        let comm = comm.get()?;
        let rank = comm.ready()?;
        let dtype = DataType::new(self.dtype);
        if !dtype.is_nccl() {
            return Err(Failure::argument(format!("there is no ncclDataType_t {}", self.dtype)));
        }
        let root = u32::try_from(self.root)
            .map_err(|_| Failure::argument(format!("rank {}", self.root)))?;
        let (op, factor) = operation(comm, self.op, dtype)?;
        let call = Call::new(self.kind, self.count as u64, dtype).op(op).root(root);
        // Checked before pointers are: a size that overflows must not look like a small one.
        call.check(rank.ranks(), None).map_err(|error| Failure::argument(error.to_string()))?;
        let place = |address: Address, bytes: u64, what: &str| match (address.get(), bytes) {
            (_, 0) => Ok(Place::None),
            (0, _) => {
                Err(Failure::argument(format!("{what} is null and has {bytes} bytes in {call}")))
            }
            (address, _) => Ok(Place::Foreign(DevicePtr::new(address))),
        };
        let bytes = (
            call.input_bytes(rank.rank(), rank.ranks()),
            call.output_bytes(rank.rank(), rank.ranks()),
        );
        let (Ok(input), Ok(output)) = bytes else { return Err(Failure::argument("too large")) };
        let input = place(self.input, input, "sendbuff")?;
        let output = place(self.output, output, "recvbuff")?;
        let stream = comm.stream(stream)?;
        Ok(rank.call(call, input, output, factor, &stream)?)
    }
}

/// A built-in operation, or one that was created.
fn operation(
    comm: &Comm,
    number: i32,
    dtype: DataType,
) -> Result<(RedOp, Option<Factor>), Failure> {
    if (0..5).contains(&number) {
        return Ok((RedOp::new(number), None));
    }
    let ops = lock(&comm.ops);
    let created = usize::try_from(i64::from(number) - 5)
        .ok()
        .and_then(|index| ops.get(index).copied().flatten());
    match created {
        Some((of, factor)) if of == dtype => Ok((RedOp::PRE_MUL_SUM, Some(factor))),
        Some((of, _)) => {
            Err(Failure::argument(format!("operation {number} was created for {of}, not {dtype}")))
        }
        None => Err(Failure::argument(format!("there is no operation {number}"))),
    }
}

use Collective as C;

export! {
    fn ncclAllReduce, pncclAllReduce(
        input: Address, output: Address, count: usize, dtype: i32, op: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::AllReduce, input, output, count, dtype).op(op).queue(comm, stream)
    }

    fn ncclReduce, pncclReduce(
        input: Address, output: Address, count: usize, dtype: i32, op: i32, root: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Reduce, input, output, count, dtype).op(op).root(root).queue(comm, stream)
    }

    fn ncclReduceScatter, pncclReduceScatter(
        input: Address, output: Address, count: usize, dtype: i32, op: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::ReduceScatter, input, output, count, dtype).op(op).queue(comm, stream)
    }

    fn ncclBroadcast, pncclBroadcast(
        input: Address, output: Address, count: usize, dtype: i32, root: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Broadcast, input, output, count, dtype).root(root).queue(comm, stream)
    }

    fn ncclBcast, pncclBcast(
        buffer: Address, count: usize, dtype: i32, root: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Broadcast, buffer, buffer, count, dtype).root(root).queue(comm, stream)
    }

    fn ncclAllGather, pncclAllGather(
        input: Address, output: Address, count: usize, dtype: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::AllGather, input, output, count, dtype).queue(comm, stream)
    }

    fn ncclAlltoAll, pncclAlltoAll(
        input: Address, output: Address, count: usize, dtype: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::AllToAll, input, output, count, dtype).queue(comm, stream)
    }

    fn ncclGather, pncclGather(
        input: Address, output: Address, count: usize, dtype: i32, root: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Gather, input, output, count, dtype).root(root).queue(comm, stream)
    }

    fn ncclScatter, pncclScatter(
        input: Address, output: Address, count: usize, dtype: i32, root: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Scatter, input, output, count, dtype).root(root).queue(comm, stream)
    }

    fn ncclSend, pncclSend(
        buffer: Address, count: usize, dtype: i32, peer: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Send, buffer, Address::default(), count, dtype).root(peer).queue(comm, stream)
    }

    fn ncclRecv, pncclRecv(
        buffer: Address, count: usize, dtype: i32, peer: i32, comm: Handle, stream: Address,
    ) {
        Raw::new(C::Recv, Address::default(), buffer, count, dtype).root(peer).queue(comm, stream)
    }
}
