//! For tests only: puts the calling thread, and every thread it starts, into a hard place.

use std::io;

/// System calls that a filter refuses: the numbers are the same on every architecture, because they
/// were added after the unification of the tables.
const IO_URING_CALLS: [u32; 3] = [425, 426, 427];

/// From now on the kernel answers `EPERM` to the io_uring system calls of this thread and of those
/// that it starts, as the default filters of container engines do. Cannot be undone.
///
/// # Errors
/// What `prctl(2)` says where seccomp filters are not built in or are refused.
pub fn deny_io_uring() -> io::Result<()> {
    let [setup, enter, register] = IO_URING_CALLS;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    // seccomp(2): the first word of `struct seccomp_data` is the number of the call.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        jump_if_equal(setup, 2),
        jump_if_equal(enter, 1),
        jump_unless_equal(register, 1),
        statement(libc::BPF_RET | libc::BPF_K, refuse),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the call takes plain numbers; it only gives up rights.
    let code = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `program` names the instructions of `filter`, as many as it says; both live until the
    // call returns, and the kernel copies them.
    let code = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

const fn jump_if_equal(k: u32, skip: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    libc::sock_filter { code, jt: skip, jf: 0, k }
}

const fn jump_unless_equal(k: u32, skip: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    libc::sock_filter { code, jt: 0, jf: skip, k }
}
