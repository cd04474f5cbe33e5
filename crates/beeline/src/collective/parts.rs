//! Communicators out of one: of some of its ranks, and of those that are left.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Inner};
use super::executor::Settings;
use super::id::{UNIQUE_ID_BYTES, UniqueId};
use crate::core::collective::{Call, Collective, DataType};
use crate::error::{Error, Kind, Result};
use crate::lock;

impl Communicator {
    /// Divides the ranks: those of one `color` become a communicator, ordered by `key` and then by rank. `None` as color
    /// takes part and joins none. All ranks are inside this call at once.
    ///
    /// # Errors
    /// As [`Self::join`]; `is_io` where a rank has left.
    pub fn split(&self, color: Option<u32>, key: i32, settings: &Settings) -> Result<Option<Self>> {
        self.inner().own()?;
        let deadline = Instant::now() + settings.join_deadline;
        let mut mine = vec![u8::from(color.is_some())];
        mine.extend(color.unwrap_or(0).to_le_bytes());
        mine.extend(key.to_le_bytes());
        let mut exchange = lock(&self.inner().exchange);
        let all = exchange.all_gather(&mine, &[], deadline)?;
        let mut members: Vec<(i32, u32)> = (0..)
            .zip(&all)
            .filter_map(|(rank, given)| {
                let (used, rest) = given.bytes.split_first()?;
                let (theirs, key) = rest.split_first_chunk::<4>()?;
                let key = i32::from_le_bytes(*key.first_chunk::<4>()?);
                let same = *used == 1 && Some(u32::from_le_bytes(*theirs)) == color;
                same.then_some((key, rank))
            })
            .collect();
        members.sort_unstable();
        let place = members.iter().position(|(_, rank)| *rank == self.inner().rank);
        let made = (place == Some(0)).then(|| UniqueId::new(settings.join_deadline));
        // A leader that has none takes part all the same: the others learn at once that it has none.
        let made = made.transpose();
        let own = made.as_ref().ok().copied().flatten().map(|id| id.to_bytes());
        let ids = exchange.all_gather(own.as_ref().map_or(&[], |bytes| bytes), &[], deadline)?;
        drop(exchange);
        made?;
        let Some(((_, leader), place)) = members.first().zip(place) else { return Ok(None) };
        let bytes = ids.get(*leader as usize).map(|given| given.bytes.as_slice());
        let bytes = bytes.and_then(|bytes| bytes.first_chunk::<UNIQUE_ID_BYTES>());
        let bytes =
            bytes.ok_or_else(|| Error::refused(format!("rank {leader} made no identifier")))?;
        let id = UniqueId::from_bytes(bytes)?;
        Self::join(&id, place as u32, members.len() as u32, &self.inner().gpu, settings).map(Some)
    }

    /// [`Self::split`] for a rank that has a color.
    ///
    /// # Errors
    /// As [`Self::split`].
    pub fn part(&self, color: u32, key: i32, settings: &Settings) -> Result<Self> {
        let part = self.split(Some(color), key, settings)?;
        part.ok_or_else(|| Error::refused(format!("rank {} is in no part", self.inner().rank)))
    }

    /// A communicator of all ranks but `excluded`, whose processes may be gone. All others are inside this call at once, and
    /// this one works no longer where it had failed; its calls in flight may be anywhere.
    ///
    /// # Errors
    /// `is_refused` for a list with this rank, with ranks that are none, or with all; `is_timeout` where the others
    /// exclude other ranks or do not come; as [`Self::join`].
    pub fn shrink(&self, excluded: &[u32], settings: &Settings) -> Result<Self> {
        self.inner().own()?;
        let Inner { rank, ranks, .. } = **self.inner();
        if excluded.contains(&rank) || excluded.iter().any(|other| *other >= ranks) {
            let text = format!("rank {rank} of {ranks} cannot go on without {excluded:?}");
            return Err(Error::refused(text).coded("collective-invalid"));
        }
        let left: Vec<u32> = (0..ranks).filter(|one| !excluded.contains(one)).collect();
        let leader = left.first().copied().unwrap_or(rank);
        // Survivors that exclude the same ranks for the same time find each other by this number.
        let number = self.inner().shrinks.load(Ordering::Relaxed) + 1;
        let tag = left.iter().fold(number, |tag, one| {
            Call::new(Collective::Barrier, u64::from(*one) + 1, DataType::U8).agreement(tag)
        });
        let deadline = Instant::now() + settings.join_deadline;
        let id = if leader == rank {
            let id = UniqueId::new(settings.join_deadline)?;
            self.inner().control.post(tag, &id.to_bytes());
            id
        } else {
            loop {
                if let Some(bytes) = self.inner().control.posted(leader, tag) {
                    break UniqueId::from_bytes(&bytes)?;
                }
                if Instant::now() >= deadline {
                    let text = format!("rank {leader} did not start to go on without {excluded:?}");
                    return Err(Error::new(Kind::Timeout, text));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let place = left.iter().position(|one| *one == rank).unwrap_or(0);
        let joined = Self::join(&id, place as u32, left.len() as u32, &self.inner().gpu, settings);
        // An attempt that failed does not count, since it may have failed on some ranks only, or for want of them.
        match joined.is_ok() {
            true => self.inner().shrinks.store(number, Ordering::Relaxed),
            false if leader == rank => self.inner().control.unpost(),
            false => {}
        }
        joined
    }
}
