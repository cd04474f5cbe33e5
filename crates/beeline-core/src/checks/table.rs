//! The table of checks, one file for each subject.

mod jobs;
mod paths;
mod probe;
mod rdma;
mod storage;

use super::Check;

/// Every check, in the order of the documentation page.
pub const TABLE: &[Check] = &ALL;

const GROUPS: [&[Check]; 5] = [paths::ROWS, rdma::ROWS, jobs::ROWS, storage::ROWS, probe::ROWS];
const COUNT: usize = paths::ROWS.len()
    + rdma::ROWS.len()
    + jobs::ROWS.len()
    + storage::ROWS.len()
    + probe::ROWS.len();
const ALL: [Check; COUNT] = concat();

/// The groups as one list, made when the program is built.
const fn concat() -> [Check; COUNT] {
    let mut all = [paths::ROWS[0]; COUNT];
    let (mut group, mut place) = (0, 0);
    while group < GROUPS.len() {
        let mut row = 0;
        while row < GROUPS[group].len() {
            all[place] = GROUPS[group][row];
            row += 1;
            place += 1;
        }
        group += 1;
    }
    all
}
