//! Ranks that are processes: the same test program, started again.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::collective::{Call, Collective, Communicator, DataType, Place, UniqueId};

use crate::support::*;

/// What a started process does; the parent waits for its exit.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var("BEELINE_TEST_RANK") else { return };
    let words: Vec<u32> = role.split(' ').map(|word| word.parse().unwrap()).collect();
    let [rank, ranks, dies] = words[..] else { panic!("{role}") };
    let id = std::env::var("BEELINE_TEST_ID").unwrap();
    let bytes: Vec<u8> = id
        .as_bytes()
        .chunks(2)
        .map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap())
        .collect();
    let id = UniqueId::from_bytes(&bytes.try_into().unwrap()).unwrap();
    let settings = settings(|settings| {
        settings.straight = dies == REGISTERED;
        settings.copy_engines = dies == WINDOWS;
    });
    let comm = Communicator::join(&id, rank, ranks, &gpu_of(rank, ranks), &settings).unwrap();
    if dies == REGISTERED {
        return crate::straight::rank(&comm, true);
    }
    if dies == WINDOWS {
        return crate::windows::rank(&comm);
    }
    calls(&comm);
    if dies == NO_FILES {
        return split_without_files(&comm);
    }
    if dies == rank {
        std::process::abort();
    }
    if dies < ranks {
        let stream = Arc::new(comm.gpu().stream().unwrap());
        comm.barrier(&stream).unwrap();
        stream.synchronize(Instant::now() + LONG).unwrap();
        let error = comm.async_error().unwrap();
        assert_eq!(error.code(), "collective-rank-lost", "{error:?}");
        assert!(error.to_string().contains(&format!("rank {dies} is gone")), "{error}");
        let left = comm.shrink(&[dies], comm.settings()).unwrap();
        assert_eq!(left.ranks(), ranks - 1);
        calls(&left);
    }
    comm.close(Instant::now() + LONG).unwrap_or(());
}

/// In place of a rank that dies: rank 0 can open no more files.
const NO_FILES: u32 = 99;

/// In place of a rank that dies: the ranks register their memory.
const REGISTERED: u32 = 98;

/// In place of a rank that dies: the ranks register memory together.
const WINDOWS: u32 = 97;

/// The leader of a part cannot listen for it: it fails, and the others of the part learn of it before any deadline. Who is in
/// another part does not notice.
fn split_without_files(comm: &Communicator) {
    if comm.rank() == 0 {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let none = rustix::process::Rlimit { current: Some(3), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
    }
    let color = u32::from(comm.rank() == 3);
    match (comm.rank(), comm.split(Some(color), 0, comm.settings())) {
        (0, Err(error)) => assert!(!error.is_timeout() && !error.is_refused(), "{error:?}"),
        (1 | 2, Err(error)) => {
            assert!(error.is_refused(), "{error:?}");
            assert!(error.to_string().contains("rank 0 made no identifier"), "{error}");
        }
        (3, Ok(Some(alone))) => calls_of_one(&alone),
        (rank, other) => panic!("rank {rank}: {other:?}"),
    }
}

fn calls_of_one(alone: &Communicator) {
    assert_eq!((alone.rank(), alone.ranks()), (0, 1));
    let stream = Arc::new(alone.gpu().stream().unwrap());
    alone.barrier(&stream).unwrap();
    stream.synchronize(Instant::now() + LONG).unwrap();
}

/// Every collective, each rank checking its own.
fn calls(comm: &Communicator) {
    let stream = Arc::new(comm.gpu().stream().unwrap());
    for kind in
        [Collective::AllReduce, Collective::AllGather, Collective::Broadcast, Collective::AllToAll]
    {
        let call = Call::new(kind, 33_333, DataType::F16).root(1);
        let (rank, ranks) = (comm.rank(), comm.ranks());
        let inputs = inputs(&call, ranks);
        let input = comm.gpu().alloc(inputs[0].len() as u64).unwrap();
        put(&input, 0, &inputs[rank as usize], &stream);
        let bytes = call.output_bytes(rank, ranks).unwrap();
        let output = comm.gpu().alloc(bytes).unwrap();
        let places = (Place::Buffer(input, 0), Place::Buffer(output.clone(), 0));
        comm.call(call, places.0, places.1, None, &stream).unwrap();
        assert!(get(&output, 0, bytes, &stream) == expected(&call, &inputs, &[], rank), "{call}");
    }
}

fn start(id: &UniqueId, ranks: u32, dies: u32) -> Vec<Child> {
    let id: String = id.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let spawn = |rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::rank_process", "--nocapture"])
            .env("BEELINE_TEST_RANK", format!("{rank} {ranks} {dies}"))
            .env("BEELINE_TEST_ID", &id)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    (0..ranks).map(spawn).collect()
}

/// What a process of a job does.
#[test]
fn launched_process() {
    if std::env::var_os("BEELINE_TEST_LAUNCHED").is_none() {
        return;
    }
    let number = |name| std::env::var(name).unwrap().parse().unwrap();
    let gpu = gpu_of(number("LOCAL_RANK"), number("WORLD_SIZE"));
    let comm = Communicator::launched(&gpu, &settings(|_| {})).unwrap();
    assert_eq!(std::env::var("RANK").unwrap(), comm.rank().to_string());
    calls(&comm);
    comm.close(Instant::now() + LONG).unwrap();
}

/// The environment of torchrun is enough to meet.
#[test]
fn a_job_finds_itself_by_its_environment() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let children: Vec<Child> = (0..3)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "processes::launched_process", "--nocapture"])
                .env("BEELINE_TEST_LAUNCHED", "1")
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", "3")
                .env("MASTER_ADDR", "127.0.0.1")
                // Communicators listen on the port after the launcher's.
                .env("MASTER_PORT", (port - 1).to_string())
                .env("TORCHELASTIC_RUN_ID", "job")
                .env("BEELINE_COMM_SECRET", "secret")
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let outside = Communicator::launched(&gpu(), &settings(|_| {})).unwrap_err();
    assert!(outside.is_not_found() || std::env::var_os("RANK").is_some(), "{outside:?}");
}

fn at_loopback() -> UniqueId {
    UniqueId::at("127.0.0.1:0".parse().unwrap(), Duration::from_secs(60)).unwrap()
}

#[test]
fn processes_are_ranks() {
    for mut child in start(&at_loopback(), 4, 9) {
        assert!(child.wait().unwrap().success());
    }
}

/// One process dies in the middle: the others are told, and go on without it.
#[test]
fn a_process_that_dies_is_named_and_the_others_go_on() {
    for (rank, mut child) in start(&at_loopback(), 4, 2).into_iter().enumerate() {
        assert_eq!(child.wait().unwrap().success(), rank != 2, "rank {rank}");
    }
}

#[test]
fn a_part_whose_leader_cannot_listen_fails_at_once() {
    for mut child in start(&at_loopback(), 4, NO_FILES) {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn processes_write_registered_memory() {
    for mut child in start(&at_loopback(), crate::straight::RANKS, REGISTERED) {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn processes_pull_from_windows() {
    for mut child in start(&at_loopback(), crate::windows::RANKS, WINDOWS) {
        assert!(child.wait().unwrap().success());
    }
}
