//! Devices: memory, streams, events.

use std::time::{Duration, Instant};

use beeline::core::addr::ByteRange;
use beeline::gpu::{Compare, KernelArg, Profile};

use crate::support::{assert_nothing_left, contents, devices, pattern, sim, soon, upload};

#[test]
fn copies_are_exact_at_every_alignment() {
    for gpu in devices() {
        let bytes = pattern(1, 100_000);
        let buffer = upload(&gpu, &bytes);
        assert_eq!(contents(&gpu, &buffer), bytes);
        let host = gpu.pin(4096).unwrap();
        let stream = gpu.stream().unwrap();
        for (offset, len) in [(0, 1), (1, 255), (255, 4000), (99_999, 1), (65_535, 3)] {
            stream.copy_to_host(&host, 7, &buffer, offset, len).unwrap();
            stream.synchronize(soon()).unwrap();
            let mut seen = vec![0; len as usize];
            host.mem().read(7, &mut seen).unwrap();
            assert_eq!(seen, bytes[offset as usize..(offset + len) as usize]);
        }
        let other = gpu.alloc(100_000).unwrap();
        stream.copy_on_device(&other, 3, &buffer, 5, 90_000).unwrap();
        stream.copy_on_device(&other, 13, &other, 3, 50_000).unwrap();
        stream.synchronize(soon()).unwrap();
        let seen = contents(&gpu, &other);
        assert_eq!(seen[13..50_013], bytes[5..50_005], "overlapping ranges move like memmove");
        assert_eq!(seen[50_013..90_003], bytes[50_015..90_005]);
        drop((buffer, other, host, stream));
        assert_nothing_left(&gpu);
    }
}

#[test]
fn slices_share_memory_and_know_their_bounds() {
    for gpu in devices() {
        let buffer = upload(&gpu, &pattern(2, 1000));
        let slice = buffer.slice(ByteRange { start: 100, len: 200 }).unwrap();
        let inner = slice.slice(ByteRange { start: 50, len: 150 }).unwrap();
        assert_eq!(contents(&gpu, &inner), pattern(2, 1000)[150..300]);
        assert_eq!(inner.ptr().as_u64() - buffer.ptr().as_u64(), 150);
        assert!(slice.slice(ByteRange { start: 50, len: 151 }).unwrap_err().is_refused());
        assert!(slice.slice(ByteRange { start: u64::MAX, len: 2 }).unwrap_err().is_refused());
        let (host, stream) = (gpu.pin(10).unwrap(), gpu.stream().unwrap());
        let outside = stream.copy_to_device(&slice, 195, &host, 0, 6).unwrap_err();
        assert!(outside.is_refused(), "{outside}");
        assert!(stream.copy_to_device(&slice, 0, &host, 9, 2).unwrap_err().is_refused());
        drop(buffer);
        assert_eq!(contents(&gpu, &inner).len(), 150, "a slice keeps the memory alive");
    }
}

#[test]
fn memory_runs_out_with_the_missing_bytes_named_and_comes_back() {
    let gpu = sim(1 << 20);
    let half = gpu.alloc(600 << 10).unwrap();
    let error = gpu.alloc(600 << 10).unwrap_err();
    assert!(error.is_out_of_memory());
    // 640 KiB are taken and 640 KiB more are needed (whole 64 KiB pages), 384 KiB are free.
    assert!(error.to_string().contains(&format!("{} bytes short", (640 - 384) << 10)), "{error}");
    assert!(gpu.alloc(0).unwrap_err().is_refused());
    assert!(gpu.pin(0).unwrap_err().is_refused());
    assert!(gpu.alloc(u64::MAX).unwrap_err().is_out_of_memory());
    drop(half);
    drop(gpu.alloc(1 << 20).unwrap());
    assert_nothing_left(&gpu);
}

#[test]
fn streams_run_in_order_and_events_join_them() {
    for gpu in devices() {
        let flag = upload(&gpu, &[0; 8]);
        let data = upload(&gpu, &[0; 4096]);
        let (one, two) = (gpu.stream().unwrap(), gpu.stream().unwrap());
        // `one` may not go on before `two` has written the flag.
        one.wait_value(&flag, 0, 5, Compare::GreaterOrEqual).unwrap();
        one.fill(&data, 0, 4096, 1).unwrap();
        let filled = one.record().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!filled.is_done().unwrap());
        assert!(filled.wait(Instant::now() + Duration::from_millis(5)).unwrap_err().is_timeout());
        two.write_value(&flag, 0, 7).unwrap();
        two.wait_event(&filled).unwrap();
        two.fill(&data, 1024, 1024, 2).unwrap();
        two.synchronize(soon()).unwrap();
        let seen = contents(&gpu, &data);
        assert!(seen[..1024].iter().chain(&seen[2048..]).all(|&byte| byte == 1));
        assert!(seen[1024..2048].iter().all(|&byte| byte == 2));
        assert!(two.write_value(&flag, 2, 0).unwrap_err().is_refused(), "misaligned word");
        let host = gpu.pin(64).unwrap();
        host.mem().store_u32(8, 0).unwrap();
        two.wait_host_value(&host, 8, 0b100, Compare::AnyBit).unwrap();
        two.write_host_value(&host, 16, 9).unwrap();
        host.mem().store_u32(8, 0b110).unwrap();
        two.synchronize(soon()).unwrap();
        assert_eq!(host.mem().load_u32(16).unwrap(), 9);
    }
}

#[test]
fn kernels_compute_and_refuse_what_does_not_fit() {
    for gpu in devices() {
        let a = upload(&gpu, &[0xff; 400]);
        let b = upload(&gpu, &[0; 400]);
        let stream = gpu.stream().unwrap();
        let buffer = |buffer: &beeline::gpu::Buffer| KernelArg::Buffer(buffer.clone());
        stream.launch("iota_u32", &[buffer(&a), KernelArg::U32(10)]).unwrap();
        stream.launch("fill_u32", &[buffer(&b), KernelArg::U32(u32::MAX)]).unwrap();
        stream.launch("add_u32", &[buffer(&a), buffer(&b)]).unwrap();
        stream.synchronize(soon()).unwrap();
        let words: Vec<u32> = contents(&gpu, &a)
            .chunks(4)
            .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
            .collect();
        assert_eq!(words, (9..109).collect::<Vec<u32>>());
        let short = b.slice(ByteRange { start: 0, len: 396 }).unwrap();
        for (name, args) in [
            ("no_such_kernel", vec![]),
            ("fill_u32", vec![buffer(&a)]),
            ("add_u32", vec![buffer(&a), buffer(&short)]),
        ] {
            assert!(stream.launch(name, &args).unwrap_err().is_refused(), "{name}");
        }
    }
}

#[test]
fn windows_exist_where_the_profile_has_them_and_follow_moves() {
    for gpu in devices() {
        let bytes = pattern(3, 200_000);
        let buffer = upload(&gpu, &bytes);
        let Some(profile) = gpu.info().profile else { continue };
        if profile == Profile::Plain {
            let error = buffer.window().unwrap_err();
            assert!(
                error.is_no_route() && error.reasons()[0].code.as_str() == "device-no-bar-window"
            );
            assert!(gpu.as_sim().unwrap().relocate(&buffer).unwrap_err().is_refused());
            continue;
        }
        let window = buffer.window().unwrap();
        let mut seen = vec![0; 1000];
        window.read(150_000, &mut seen).unwrap();
        assert_eq!(seen, bytes[150_000..151_000]);
        window.write(10, b"through the bar").unwrap();
        assert_eq!(&contents(&gpu, &buffer)[10..25], b"through the bar");
        assert!(window.read(199_999, &mut [0; 2]).unwrap_err().is_refused());
        let (before, run) = window.bus_addr(100).unwrap();
        assert!(run > 0 && before.as_u64() > 0);
        let device = gpu.as_sim().unwrap();
        if profile == Profile::Bar {
            assert!(device.relocate(&buffer).unwrap_err().is_refused());
            continue;
        }
        let address = buffer.ptr();
        device.relocate(&buffer).unwrap();
        assert_ne!(window.bus_addr(100).unwrap().0, before, "the pages moved");
        assert_eq!(buffer.ptr(), address, "the device address did not");
        assert_eq!(&contents(&gpu, &buffer)[10..25], b"through the bar");
        assert_eq!(contents(&gpu, &buffer)[30..], bytes[30..]);
    }
}

#[test]
fn memory_may_move_under_copies_without_a_torn_byte() {
    let gpu = devices().into_iter().find(|gpu| gpu.info().profile == Some(Profile::Movable));
    let gpu = gpu.unwrap();
    let (a, b) = (gpu.alloc(1 << 20).unwrap(), gpu.alloc(1 << 20).unwrap());
    let mover = std::thread::spawn({
        let (gpu, a, b) = (gpu.clone(), a.clone(), b.clone());
        move || {
            for round in 0..400 {
                let which = if round % 2 == 0 { &a } else { &b };
                gpu.as_sim().unwrap().relocate(which).unwrap();
            }
        }
    });
    let (one, two) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    for round in 0..200_u8 {
        one.fill(&a, 0, 1 << 20, round).unwrap();
        one.copy_on_device(&b, 0, &a, 0, 1 << 20).unwrap();
        let copied = one.record().unwrap();
        two.wait_event(&copied).unwrap();
        two.copy_on_device(&a, 0, &b, 0, 1 << 20).unwrap();
        two.synchronize(soon()).unwrap();
        assert!(contents(&gpu, &b).iter().all(|&byte| byte == round), "round {round}");
    }
    mover.join().unwrap();
    drop((a, b));
    assert_nothing_left(&gpu);
}
