//! Which transfers of a group go into which launch.
//!
//! A launch ends when all of its transfers have, so two that share one wait for each other. Where each rank has at most
//! one transfer a pair and direction, one launch has them all. Where there are more, the k-th of each pair and direction
//! is in round k on both sides; and sends that need no help, since the receiver's window has room for them, go ahead of
//! all rounds: the receiver may have divided its transfers into groups in another way, and need them before it sends
//! what the first round of this rank waits for.

/// A transfer, as far as its place in the order is concerned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) peer: u32,
    pub(super) sends: bool,
    /// Of the room that the receiver has for what this rank sends it, in parts of [`ROOM`].
    pub(super) cost: u64,
}

/// The room in a window for what is sent by one rank: two messages of packets or lines, or so many chunks a
/// block.
pub(super) const ROOM: u64 = 4;

/// Indices into `all`, by launch. `mixed`: a launch may become several kernels, one behind the other, so that a send
/// could stand behind what this rank receives even where there is one of each.
pub(super) fn launches(all: &[Transfer], mixed: bool) -> Vec<Vec<usize>> {
    let mut counted: Vec<(u32, bool, usize, u64)> = Vec::new();
    // The place of each among those of its pair and direction, and what these cost up to it.
    let mut places = Vec::with_capacity(all.len());
    for one in all {
        let known =
            counted.iter_mut().find(|(peer, sends, ..)| (*peer, *sends) == (one.peer, one.sends));
        let (count, cost) = match known {
            Some((.., count, cost)) => {
                (*count, *cost) = (*count + 1, cost.saturating_add(one.cost));
                (*count, *cost)
            }
            None => {
                counted.push((one.peer, one.sends, 0, one.cost));
                (0, one.cost)
            }
        };
        places.push((count, cost));
    }
    let rounds = places.iter().map(|(place, _)| place + 1).max().unwrap_or(0);
    if rounds <= 1 && !mixed {
        return if all.is_empty() { Vec::new() } else { vec![(0..all.len()).collect()] };
    }
    let (mut early, mut late) = (vec![Vec::new(); rounds], vec![Vec::new(); rounds]);
    for ((index, one), (place, cost)) in all.iter().enumerate().zip(places) {
        // What comes before it is early too: costs only add up.
        let list = if one.sends && cost <= ROOM { &mut early } else { &mut late };
        if let Some(round) = list.get_mut(place) {
            round.push(index);
        }
    }
    early.into_iter().chain(late).filter(|round| !round.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_no_help_goes_ahead_and_rounds_stay_aligned() {
        let send = |peer, cost| Transfer { peer, sends: true, cost };
        let take = |peer| Transfer { peer, sends: false, cost: 1 };
        let cases: [(&[Transfer], &[&[usize]]); 6] = [
            (&[], &[]),
            // One a pair and direction: all together, whatever they cost.
            (&[send(1, 9), take(1), send(2, 1), take(0)], &[&[0, 1, 2, 3]]),
            // The last send does not wait for what is received.
            (&[send(1, 2), take(2), send(1, 2)], &[&[0], &[2], &[1]]),
            // No room for a third message: it is in the third round, as on the other side.
            (
                &[send(1, 2), send(1, 2), send(1, 2), take(1), take(1)],
                &[&[0], &[1], &[3], &[4], &[2]],
            ),
            // A large one and whatever follows it to the same rank stay in their rounds.
            (&[send(1, 5), send(1, 1), send(2, 1), take(1)], &[&[2], &[0, 3], &[1]]),
            // Costs that overflow are no room.
            (&[send(1, u64::MAX), send(1, u64::MAX)], &[&[0], &[1]]),
        ];
        for (all, expected) in cases {
            assert_eq!(launches(all, false), expected, "{all:?}");
        }
        // A small receive would stand before a large send.
        assert_eq!(launches(&[take(1), send(1, 2)], true), [[1], [0]]);
        assert_eq!(launches(&[take(1), send(1, 5)], true), [[0, 1]]);
        assert!(launches(&[], true).is_empty());
    }
}
