//! The test library's own captures: what the driver's documentation forbids is refused, the rest is replayed in its order. Tests
//! of what the library does while a stream is captured are worth what this is: the answers are those of driver 580 (measured on
//! 2026-11-30), but for what is said to be stricter.

use crate::driver::Direct;

const GLOBAL: usize = 0;
const THREAD_LOCAL: usize = 1;
const RELAXED: usize = 2;

/// Streams, events and memory of one process.
struct World {
    direct: Direct,
    /// The stream that is captured.
    captured: usize,
    other: usize,
    /// Recorded in the other stream, and in the captured one.
    event: usize,
    inside: usize,
    memory: usize,
}

impl World {
    fn new() -> Self {
        let direct = Direct::open();
        direct.push_primary(0);
        let stream = || direct.ask("cuStreamCreate", 1);
        let event = || direct.ask("cuEventCreate", 2);
        let (captured, other, event, inside) = (stream(), stream(), event(), event());
        let memory = direct.ask("cuMemAlloc_v2", 4096);
        direct.done("cuEventRecord", &[event, other]);
        direct.finish(other);
        Self { direct, captured, other, event, inside, memory }
    }

    /// What the device has there.
    fn word(&self, at: usize) -> u32 {
        let mut word = 0_u32;
        let place = (&raw mut word).expose_provenance();
        self.direct.done("cuMemcpyDtoH_v2", &[place, self.memory + at, 4]);
        word
    }
}

/// Every call that says something about captures: what it answers while a stream is captured in the strictest mode, and in
/// the relaxed one; then whether the capture goes on.
pub fn rules() {
    let world = World::new();
    let World { direct, captured, other, event, inside, memory } = &world;
    let mut place = 0_usize;
    let (place, at) = ((&raw mut place).expose_provenance(), *captured);
    let blocking = direct.ask("cuStreamCreate", 0);
    let mut ipc = [0_u8; 64];
    let handle = (&raw mut ipc).expose_provenance();
    let unmoved: &[(&str, &[usize], i32, i32)] = &[
        // What concerns the captured stream itself, whatever the mode.
        ("cuStreamQuery", &[at], 900, 900),
        ("cuStreamSynchronize", &[at], 900, 900),
        ("cuStreamGetId", &[at, place], 900, 900),
        ("cuStreamGetFlags", &[at, place], 900, 900),
        ("cuStreamWaitEvent", &[at, *event, 0], 905, 905),
        ("cuEventQuery", &[*inside], 907, 907),
        ("cuCtxSynchronize", &[], 900, 900),
        // Stricter: the real driver has memory of graphs.
        ("cuMemAllocAsync", &[place, 4096, at], 900, 900),
        // What only a thread that is not relaxed may not do.
        ("cuStreamQuery", &[*other], 900, 0),
        ("cuStreamSynchronize", &[*other], 900, 0),
        ("cuEventQuery", &[*event], 900, 0),
        ("cuMemAlloc_v2", &[place, 4096], 900, 0),
        // What is allowed.
        ("cuStreamIsCapturing", &[at, place], 0, 0),
        ("cuStreamGetCtx", &[at, place], 0, 0),
        ("cuStreamGetPriority", &[at, place], 0, 0),
        ("cuStreamGetPriority", &[*other, place], 0, 0),
        ("cuStreamGetId", &[*other, place], 0, 0),
        ("cuStreamCreate", &[place, 1], 0, 0),
        ("cuEventCreate", &[place, 2], 0, 0),
        ("cuMemsetD8_v2", &[*memory, 1, 4096], 0, 0),
        ("cuMemcpyDtoH_v2", &[place, *memory, 8], 0, 0),
        ("cuMemcpyDtoHAsync_v2", &[place, *memory, 8, at], 0, 0),
        ("cuStreamWriteValue32_v2", &[at, *memory, 1, 0], 0, 0),
        ("cuStreamWaitValue32_v2", &[at, *memory, 1, 0], 0, 0),
        ("cuIpcGetMemHandle", &[handle, *memory], 0, 0),
        ("cuEventRecord", &[*event, *other], 0, 0),
        ("cuMemsetD8Async", &[*memory, 1, 4096, at], 0, 0),
        ("cuMemsetD8Async", &[*memory, 1, 4096, *other], 0, 0),
        // The legacy stream does not wait for this one.
        ("cuMemsetD8Async", &[*memory, 1, 4096, 0], 0, 0),
    ];
    for (name, arguments, strict, relaxed) in unmoved {
        for (mode, code) in [(GLOBAL, *strict), (THREAD_LOCAL, *strict), (RELAXED, *relaxed)] {
            let refused = direct.counter("refused");
            direct.begin(at, mode);
            direct.done("cuEventRecord", &[*inside, at]);
            let answer = match direct.call(name, arguments) {
                // Answered, that it is not done yet.
                600 => 0,
                answer => answer,
            };
            assert_eq!(answer, code, "{name} {arguments:x?}, mode {mode}");
            let rest = if code == 0 { Ok(()) } else { Err(901) };
            let node = direct.call("cuMemsetD8Async", &[*memory, 2, 1, at]);
            assert_eq!(node, rest.err().unwrap_or(0), "{name}, mode {mode}");
            assert_eq!(direct.end(at).map(drop), rest, "{name}, mode {mode}");
            let told = 3 * i64::from(code != 0);
            assert_eq!(direct.counter("refused") - refused, told, "{name}, mode {mode}");
        }
    }
    // A stream that the legacy stream waits for.
    direct.begin(blocking, RELAXED);
    assert_eq!(direct.call("cuStreamIsCapturing", &[0, place]), 906);
    assert!(direct.end(blocking).is_ok(), "asking spoils nothing");
    direct.begin(blocking, RELAXED);
    assert_eq!(direct.call("cuMemsetD8Async", &[*memory, 1, 4096, 0]), 906);
    assert_eq!(direct.end(blocking).map(drop), Err(901));
    // The beginning and the end themselves.
    assert_eq!(direct.call("cuStreamBeginCapture_v2", &[0, RELAXED]), 900);
    assert_eq!(direct.call("cuStreamBeginCapture_v2", &[at, 3]), 1);
    assert_eq!(direct.end(at), Err(401));
    direct.begin(at, RELAXED);
    assert_eq!(direct.call("cuStreamBeginCapture_v2", &[at, RELAXED]), 401);
    let exec = direct.end(at).unwrap();
    direct.begin(*other, RELAXED);
    assert_eq!(direct.call("cuGraphLaunch", &[exec, *other]), 900);
    assert_eq!(direct.end(*other), Err(901));
    // A stream that is destroyed takes its capture along; another one of the capture may not be (stricter: not measured).
    let gone = direct.ask("cuStreamCreate", 1);
    direct.begin(gone, RELAXED);
    direct.done("cuEventRecord", &[*inside, gone]);
    direct.done("cuStreamWaitEvent", &[*other, *inside, 0]);
    direct.done("cuStreamDestroy_v2", &[gone]);
    assert_eq!(direct.call("cuEventQuery", &[*inside]), 1);
    assert_eq!(direct.end(*other), Err(401));
    direct.begin(at, RELAXED);
    direct.done("cuEventRecord", &[*inside, at]);
    direct.done("cuStreamWaitEvent", &[*other, *inside, 0]);
    assert_eq!(direct.call("cuStreamDestroy_v2", &[*other]), 900);
    assert_eq!(direct.end(at), Err(901));
    // Nothing is refused when no stream of the device is captured.
    direct.done("cuCtxSynchronize", &[]);
}

/// In which modes a capture and another thread, or its own, leave each other alone.
pub fn modes() {
    let World { direct, captured, event, .. } = &World::new();
    for (capture, thread, own, others) in [
        (GLOBAL, GLOBAL, 900, 900),
        (GLOBAL, THREAD_LOCAL, 900, 0),
        (GLOBAL, RELAXED, 0, 0),
        (THREAD_LOCAL, GLOBAL, 900, 0),
        (THREAD_LOCAL, THREAD_LOCAL, 900, 0),
        (THREAD_LOCAL, RELAXED, 0, 0),
        (RELAXED, GLOBAL, 0, 0),
        (RELAXED, THREAD_LOCAL, 0, 0),
        (RELAXED, RELAXED, 0, 0),
    ] {
        let ask = || {
            let before = direct.exchange_mode(thread as i32);
            let code = direct.call("cuEventQuery", &[*event]);
            direct.exchange_mode(before);
            code
        };
        let what = format!("a capture of mode {capture}, a thread of mode {thread}");
        direct.begin(*captured, capture);
        assert_eq!(ask(), own, "{what}");
        assert_eq!(direct.end(*captured).is_ok(), own == 0, "{what}");
        direct.begin(*captured, capture);
        let answers = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                direct.push_primary(0);
                let (answer, mut graph) = (ask(), 0_usize);
                let place = (&raw mut graph).expose_provenance();
                (answer, direct.call("cuStreamEndCapture", &[*captured, place]))
            });
            other.join().unwrap()
        });
        assert_eq!(answers.0, others, "{what}");
        if capture == RELAXED {
            // The other thread has ended it.
            assert_eq!((answers.1, direct.end(*captured)), (0, Err(401)), "{what}");
        } else {
            assert_eq!((answers.1, direct.end(*captured)), (908, Err(901)), "{what}");
        }
    }
}

/// Streams that join a capture, and how they must not.
pub fn forks() {
    let World { direct, captured, other, event, inside, memory } = &World::new();
    let third = direct.ask("cuStreamCreate", 1);
    let fork = || {
        direct.begin(*captured, RELAXED);
        direct.done("cuEventRecord", &[*inside, *captured]);
        direct.done("cuStreamWaitEvent", &[*other, *inside, 0]);
        direct.done("cuMemsetD8Async", &[*memory, 1, 4096, *other]);
    };
    fork();
    assert_eq!(direct.end(*captured), Err(904), "not joined");
    fork();
    assert_eq!(direct.end(*other), Err(903), "not where it began");
    assert_eq!(direct.end(*captured), Err(901));
    fork();
    assert_eq!(direct.call("cuStreamQuery", &[*other]), 900, "part of the capture");
    assert_eq!(direct.end(*captured), Err(901));
    fork();
    direct.begin(third, RELAXED);
    assert_eq!(direct.call("cuStreamWaitEvent", &[third, *inside, 0]), 902, "two captures");
    assert_eq!((direct.end(third), direct.end(*captured)), (Err(901), Err(901)));
    // An event of a capture that has ended.
    assert_eq!(direct.call("cuStreamWaitEvent", &[*other, *inside, 0]), 1);
    assert_eq!(direct.call("cuEventQuery", &[*inside]), 1);
    fork();
    direct.done("cuEventRecord", &[*event, *other]);
    direct.done("cuStreamWaitEvent", &[*captured, *event, 0]);
    let nodes = direct.counter("captured");
    assert!(direct.end(*captured).is_ok());
    direct.done("cuMemsetD8Async", &[*memory, 1, 4096, *other]);
    assert_eq!(direct.counter("captured"), nodes, "the other stream is free again");
}

/// What was captured runs when it is launched, as often as that, in the order of its edges, behind and before what the
/// stream has.
pub fn replays() {
    let world = World::new();
    let World { direct, captured, other, event, inside, memory } = &world;
    let at = |word: usize| memory + 4 * word;
    let copy = |to: usize, from: usize, stream: usize| {
        direct.done("cuMemcpyDtoDAsync_v2", &[at(to), at(from), 4, stream]);
    };
    direct.done("cuMemsetD8_v2", &[*memory, 0, 4096]);
    // Word 1 becomes word 0 in a stream that waits until the other one has let it, which has copied word 0 to 2 before.
    direct.begin(*captured, GLOBAL);
    direct.done("cuEventRecord", &[*inside, *captured]);
    direct.done("cuStreamWaitEvent", &[*other, *inside, 0]);
    direct.done("cuStreamWaitValue32_v2", &[*captured, at(8), 1, 1]);
    copy(1, 0, *captured);
    copy(2, 0, *other);
    direct.done("cuMemsetD8Async", &[at(0), 9, 4, *other]);
    direct.done("cuStreamWriteValue32_v2", &[*other, at(8), 1, 0]);
    direct.done("cuEventRecord", &[*event, *other]);
    direct.done("cuStreamWaitEvent", &[*captured, *event, 0]);
    direct.done("cuStreamWriteValue32_v2", &[*captured, at(8), 0, 0]);
    let exec = direct.end(*captured).unwrap();
    assert_eq!(direct.counter("captured"), 6);
    assert_eq!([0, 1, 2].map(|word| world.word(4 * word)), [0; 3], "nothing has run yet");
    for value in [5_usize, 6, 7] {
        direct.done("cuStreamWriteValue32_v2", &[*captured, at(0), value, 0]);
        direct.done("cuGraphLaunch", &[exec, *captured]);
        copy(3, 1, *captured);
        // Again, in another stream: launches of one graph do not overlap.
        direct.done("cuGraphLaunch", &[exec, *other]);
        direct.finish(*captured);
        direct.finish(*other);
        let nine = 0x0909_0909;
        let found = [0, 1, 2, 8].map(|word| world.word(4 * word));
        assert_eq!(found, [nine, nine, nine, 0], "{value}");
        assert!([value as u32, nine].contains(&world.word(12)), "{value}");
    }
    direct.done("cuGraphExecDestroy", &[exec]);
    assert_eq!(direct.counter("graphs"), 0);
    across_devices(&world);
}

/// A capture that spans two devices.
fn across_devices(world: &World) {
    let World { direct, captured, event, memory, .. } = world;
    direct.push_primary(1);
    let far = direct.ask("cuStreamCreate", 1);
    let there = direct.ask("cuMemAlloc_v2", 4096);
    let here = direct.ask("cuEventCreate", 2);
    let context = direct.current();
    let (first, second) = (direct.push_primary(0), context);
    direct.begin(*captured, THREAD_LOCAL);
    direct.done("cuMemsetD8Async", &[*memory, 3, 4096, *captured]);
    direct.done("cuEventRecord", &[*event, *captured]);
    direct.done("cuCtxPushCurrent_v2", &[second]);
    direct.done("cuStreamWaitEvent", &[far, *event, 0]);
    direct.done("cuMemcpyPeerAsync", &[there, second, *memory, first, 4096, far]);
    direct.done("cuEventRecord", &[here, far]);
    direct.done("cuCtxPushCurrent_v2", &[first]);
    direct.done("cuStreamWaitEvent", &[*captured, here, 0]);
    let exec = direct.end(*captured).unwrap();
    direct.done("cuGraphLaunch", &[exec, *captured]);
    direct.finish(*captured);
    let mut word = 0_u32;
    direct.done("cuCtxPushCurrent_v2", &[second]);
    direct.done("cuMemcpyDtoH_v2", &[(&raw mut word).expose_provenance(), there + 4092, 4]);
    assert_eq!(word, 0x0303_0303);
}
