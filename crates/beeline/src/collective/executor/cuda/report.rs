//! What a kernel says when it gave up.

use crate::collective::control::{Control, Failure};
use crate::core::collective::{
    Announcement, Call, Collective, DataType, Disagreement, RedOp, Trouble,
};
use crate::error::Kind;

/// Where kernels write their report in the own segment: code and rank, then as `Report` of beeline-sys
/// has it; 64 bytes. The word after it says that the rank has closed.
pub(in crate::collective) const REPORT_OFFSET: u64 = 57344;

/// The report of this rank's kernels, if there is one.
pub(in crate::collective) fn failure(control: &Control) -> Option<Failure> {
    let rank = control.rank();
    let word = |at| control.load(rank, REPORT_OFFSET + at);
    let first = word(0);
    let (code, other) = (first as u32, (first >> 32) as u32);
    let (mine, theirs) = ((word(8), word(16)), (word(24), word(32)));
    let waited_ms = word(40) / 1_000_000;
    let block = word(48) as u32;
    let trouble = match code {
        0 => return None,
        1 => Trouble::Mismatch,
        2 if theirs.0 == 0 => Trouble::Straggler,
        2 => Trouble::Stalled,
        3 | 4 if control.has_aborted(other) || code == 3 => Trouble::Aborted,
        4 => Trouble::Stalled,
        other => {
            let text = format!("a kernel reported code {other} in block {block}");
            return Some(Failure::Other(Kind::Device, text));
        }
    };
    let last = control.last(rank);
    let sequence = last.map_or(0, |last| last.sequence);
    let mine = call(mine).or_else(|| last.map(|last| last.call));
    let Some(mine) = mine else {
        let text = format!("a kernel waited {waited_ms} ms for rank {other}: {trouble:?}");
        return Some(Failure::Other(Kind::Device, text));
    };
    let theirs = match call(theirs) {
        Some(call) => Some(Announcement { sequence, call }),
        None => control.last(other),
    };
    let mine = Announcement { sequence, call: mine };
    Some(Failure::Disagreement(Disagreement { trouble, rank, mine, other, theirs, waited_ms }))
}

/// The two words of a header: kind, type, operation and root packed as in an announcement, then the count;
/// a transfer's type is in the upper byte of its count.
pub(super) fn words(call: &Call) -> (u64, u64) {
    if call.kind.is_pairwise() {
        let dtype = call.dtype.number() as u64 & 0xff;
        return (Collective::Send as u64, (call.count & COUNT_MASK) | dtype << 56);
    }
    let [_, packed, count, _] = Announcement { sequence: 0, call: *call }.encode();
    (packed, count)
}

const COUNT_MASK: u64 = (1 << 56) - 1;

fn call((packed, count): (u64, u64)) -> Option<Call> {
    let kind = Collective::numbered((packed & 0xff) as u8)?;
    if packed == 0 && count == 0 {
        return None;
    }
    if kind.is_pairwise() {
        return Some(Call::new(kind, count & COUNT_MASK, DataType::new((count >> 56) as i32)));
    }
    let dtype = DataType::new((packed >> 8 & 0xffff) as i32);
    let call = Call::new(kind, count, dtype).op(RedOp::new((packed >> 24 & 0xff) as i32));
    Some(call.root((packed >> 32) as u32))
}
