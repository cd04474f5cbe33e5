use super::*;

fn ring() -> (Writer, Reader) {
    let (writer, file) = Writer::new().unwrap();
    (writer, Reader::new(&file).unwrap())
}

fn pop(reader: &mut Reader) -> Option<(Tag, Vec<u8>)> {
    let mut bytes = Vec::new();
    let tag = reader.pop(&mut bytes)?;
    Some((tag, bytes))
}

#[test]
fn messages_of_every_length_arrive_in_order_many_times_around() {
    let (mut writer, mut reader) = ring();
    let message = |n: usize| vec![n as u8; (n * 7919) % (MESSAGE_MAX + 1)];
    let (mut written, mut read) = (0, 0);
    while read < 2000 {
        let tag = if written % 5 == 0 { Tag::Gone } else { Tag::Packet };
        if written < 2000 && writer.push(tag, &message(written)) {
            written += 1;
            continue;
        }
        // Full: nothing more goes in until something was taken and given back.
        writer.publish();
        for _ in 0..3 {
            let Some((tag, bytes)) = pop(&mut reader) else { break };
            assert_eq!(bytes, message(read));
            assert_eq!(tag == Tag::Gone, read % 5 == 0);
            read += 1;
        }
        reader.release();
    }
    assert!(!reader.has_message());
}

#[test]
fn a_sleeper_is_seen_or_sees() {
    let (mut writer, reader) = ring();
    assert!(!writer.publish());
    assert!(!reader.set_sleeping(true));
    assert!(writer.push(Tag::Packet, &[1]));
    assert!(writer.publish(), "the reader sleeps");
    assert!(reader.set_sleeping(true), "a message is there");
    reader.set_sleeping(false);
    assert!(!writer.publish());
}

/// Whatever the writer puts there, the reader takes what fits or stops.
#[test]
fn a_writer_that_lies_is_not_followed() {
    let word = |tag: u64, len: u64| MESSAGE | (tag << 32) | len;
    let cases = [
        word(0, MESSAGE_MAX as u64 + 1),
        word(0, 0xffff_ffff),
        word(6, 8),
        // Nothing is left to skip, so a writer that skips again and again is not followed.
        word(SKIP, 0),
        8,
        1 << 32,
        u64::MAX,
    ];
    for first in cases {
        let (writer, mut reader) = ring();
        writer.mem.store_u64(MESSAGES, first).unwrap();
        assert!(pop(&mut reader).is_none(), "{first:#x}");
        assert!(!reader.has_message(), "{first:#x}");
    }
    // A message that goes over the end.
    let (mut writer, mut reader) = ring();
    while writer.head < CAPACITY - 8192 {
        assert!(writer.push(Tag::Packet, &[0; 4096]));
        writer.publish();
        assert!(pop(&mut reader).is_some());
        reader.release();
    }
    let left = CAPACITY - writer.head;
    writer.mem.store_u64(MESSAGES + writer.head, word(0, left)).unwrap();
    assert!(pop(&mut reader).is_none() && !reader.has_message());
    // A skip, and then another one.
    let (mut writer, mut reader) = ring();
    assert!(writer.push(Tag::Packet, &[0; 8]));
    writer.publish();
    assert!(pop(&mut reader).is_some());
    for at in [0, 16] {
        writer.mem.store_u64(MESSAGES + at, word(SKIP, 0)).unwrap();
    }
    assert!(pop(&mut reader).is_none());
    assert!(!reader.has_message());
}

/// The writer shows nothing before it publishes, and then everything.
#[test]
fn messages_are_seen_when_they_are_published() {
    let (mut writer, mut reader) = ring();
    for n in 0..3 {
        assert!(writer.push(Tag::Packet, &[n; 9]));
        assert!(!reader.has_message() && pop(&mut reader).is_none());
    }
    writer.publish();
    for n in 0..3 {
        assert_eq!(pop(&mut reader), Some((Tag::Packet, vec![n; 9])));
    }
    assert!(!reader.has_message());
    writer.publish();
    assert!(!reader.has_message());
}

#[test]
fn a_reader_that_lies_gets_nothing_overwritten() {
    for tail in [u64::MAX, 1 << 40] {
        let (mut writer, reader) = ring();
        while writer.push(Tag::Packet, &[0; 4096]) {}
        reader.mem.store_u64(TAIL, tail).unwrap();
        assert!(!writer.push(Tag::Packet, &[0; 4096]), "{tail}");
    }
}

#[test]
fn a_thread_on_each_side() {
    let (mut writer, mut reader) = ring();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..20_000_u64 {
                while !writer.push(Tag::Packet, &n.to_le_bytes().repeat(64)) {
                    std::thread::yield_now();
                }
                writer.publish();
            }
        });
        for n in 0..20_000_u64 {
            let bytes = loop {
                match pop(&mut reader) {
                    Some((_, bytes)) => break bytes,
                    None => std::thread::yield_now(),
                }
            };
            reader.release();
            assert_eq!(bytes, n.to_le_bytes().repeat(64));
        }
    });
}
