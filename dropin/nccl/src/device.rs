//! The interface for kernels: teams are computed, the rest is not there.

use crate::abi::{Address, Team, export, export_value};
use crate::comm::Handle;
use crate::failure::Failure;

fn absent() -> Result<(), Failure> {
    Err(Failure::usage(
        "this library has no device communicators (GIN, LSA windows); use host calls",
    ))
}

/// All ranks: a communicator is of one host, so all reach each other's memory.
fn world(comm: Handle) -> Option<Team> {
    let rank = comm.get().ok()?.ready().ok()?;
    Some(Team { ranks: rank.ranks() as i32, rank: rank.rank() as i32, stride: 1 })
}

fn translate(comm: Handle, team: Team, rank: i32) -> Option<i32> {
    let own = world(comm)?.rank;
    rank.checked_sub(team.rank)?.checked_mul(team.stride)?.checked_add(own)
}

export! {
    fn ncclDevCommCreate, pncclDevCommCreate(_comm: Handle, _requirements: Address, _made: Address) { absent() }
    fn ncclDevCommDestroy, pncclDevCommDestroy(_comm: Handle, _made: Address) { absent() }
    fn ncclLLA2ACreateRequirement, pncclLLA2ACreateRequirement(
        _blocks: i32, _slots: i32, _handle: Address, _requirements: Address,
    ) { absent() }
    fn ncclLsaBarrierCreateRequirement, pncclLsaBarrierCreateRequirement(
        _team: Team, _barriers: i32, _handle: Address, _requirements: Address,
    ) { absent() }
}

export_value! {
    fn ncclTeamWorld, pncclTeamWorld(comm: Handle) -> Team { world(comm).unwrap_or_default() }
    fn ncclTeamLsa, pncclTeamLsa(comm: Handle) -> Team { world(comm).unwrap_or_default() }
    fn ncclTeamRail, pncclTeamRail(comm: Handle) -> Team {
        world(comm).map_or_else(Team::default, |world| Team { ranks: 1, rank: 0, stride: world.ranks })
    }
    fn ncclTeamRankToWorld, pncclTeamRankToWorld(comm: Handle, team: Team, rank: i32) -> i32 {
        translate(comm, team, rank).unwrap_or(-1)
    }
    fn ncclTeamRankToLsa, pncclTeamRankToLsa(comm: Handle, team: Team, rank: i32) -> i32 {
        translate(comm, team, rank).unwrap_or(-1)
    }
    fn ncclLLA2ACalcSlots, pncclLLA2ACalcSlots(elements: i32, bytes: i32) -> i32 {
        elements.saturating_mul(bytes.saturating_add(7) / 8)
    }
}
