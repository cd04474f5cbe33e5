//! What the calling thread costs, and where it may run.

use std::io;
use std::num::NonZeroU64;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time the calling thread has used since it started (user and system).
pub fn cpu_time() -> Duration {
    of(ClockId::ThreadCPUTime)
}

/// CPU time all threads of this process have used since it started (user and system).
pub fn process_cpu_time() -> Duration {
    of(ClockId::ProcessCPUTime)
}

fn of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let secs = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The CPUs that the calling thread may run on, in rising order.
///
/// # Errors
/// What `sched_getaffinity(2)` says.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Confines the calling thread to `cpus`; numbers beyond the kernel's set size are ignored.
///
/// # Errors
/// What `sched_setaffinity(2)` says: `EINVAL` where none of them is online and allowed.
pub fn pin_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < rustix::thread::CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

/// Sleeps for `time`, and only some microseconds longer: the kernel may put off the end of a sleep by the thread's timer
/// slack, 50 microseconds where nobody set it, which is set aside for this sleep.
pub fn nap(time: Duration) {
    let slack = rustix::thread::current_timer_slack().ok().and_then(NonZeroU64::new);
    let exact =
        slack.is_some() && rustix::thread::set_current_timer_slack(NonZeroU64::new(1)).is_ok();
    std::thread::sleep(time);
    if exact {
        let _ = rustix::thread::set_current_timer_slack(slack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_costs_and_may_run_somewhere() {
        let before = cpu_time();
        let sum = (0..200_000_u64).fold(0, |sum: u64, n| sum.wrapping_add(std::hint::black_box(n)));
        assert_ne!(sum, 0);
        assert!(cpu_time() > before);
        assert!(process_cpu_time() >= cpu_time());
        let cpus = allowed_cpus().unwrap();
        assert!(!cpus.is_empty());
        pin_to(&cpus).unwrap();
    }

    #[test]
    fn a_nap_lasts_and_leaves_the_timer_slack_alone() {
        let slack = NonZeroU64::new(70_000);
        rustix::thread::set_current_timer_slack(slack).unwrap();
        let since = std::time::Instant::now();
        nap(Duration::from_micros(200));
        assert!(since.elapsed() >= Duration::from_micros(200));
        assert_eq!(NonZeroU64::new(rustix::thread::current_timer_slack().unwrap()), slack);
    }
}
