use super::*;

fn error_of(bytes: &[u8]) -> BinaryError {
    Pickle::read(bytes).map(|_| ()).unwrap_err()
}

/// `pickle.dumps({'a': [1, -2, 300, 70000, 2**40, -1.5, None, True], 'b': ('xy', 'é')}, 2)` of CPython 3.11. `PROTOCOL_5` has
/// `b'xy'` instead of `'xy'`.
const PROTOCOL_2: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01G\xbf\xf8\x00\x00\x00\x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03X\x02\x00\x00\x00xyq\x04X\x02\x00\x00\x00\xc3\xa9q\x05\x86q\x06u.";
const PROTOCOL_5: &[u8] = b"\x80\x05\x95?\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01G\xbf\xf8\x00\x00\x00\x00\x00\x00N\x88e\x8c\x01b\x94C\x02xy\x94\x8c\x02\xc3\xa9\x94\x86\x94u.";

#[test]
fn reads_plain_values_of_protocols_2_and_5() {
    for bytes in [PROTOCOL_2, PROTOCOL_5] {
        let pickle = Pickle::read(bytes).unwrap();
        let list = pickle.get(pickle.root(), "a").unwrap();
        assert_eq!(
            pickle.list(list).unwrap(),
            [
                Value::Int(1),
                Value::Int(-2),
                Value::Int(300),
                Value::Int(70_000),
                Value::Int(1 << 40),
                Value::Float(-1.5),
                Value::None,
                Value::Bool(true)
            ]
        );
        let tuple = pickle
            .list(pickle.get(pickle.root(), "b").unwrap())
            .unwrap();
        assert_eq!(pickle.text(*tuple.last().unwrap()), Some("é"));
    }
}

#[test]
fn rejects_globals_that_tensors_do_not_need() {
    // os.system("id") in protocols 2 and 4
    let error = error_of(b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.");
    assert_eq!(error.offset, 2);
    assert!(error.reason.contains("\"os.system\""), "{}", error.reason);
    let error = error_of(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.");
    assert_eq!(error.offset, 14);
    assert!(error.reason.contains("\"os.system\""), "{}", error.reason);
    // INST, OBJ, NEWOBJ, EXT1, REDUCE of a value that is not a global
    for bytes in [
        &b"\x80\x02(ios\nsystem\n."[..],
        b"\x80\x02(K\x01o.",
        b"\x80\x02K\x01)\x81.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02K\x01)R.",
    ] {
        assert!(error_of(bytes).offset > 0, "{bytes:?}");
    }
}

#[test]
fn rejects_damaged_pickles() {
    for bytes in [
        &b""[..],
        b"\x80",
        b"\x80\x02",
        b"\x80\x09N.",
        b"\x80\x02.",
        b"\x80\x02a.",
        b"\x80\x02(.",
        b"\x80\x02N(0.",
        b"\x80\x02e.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02h\x07.",
        b"\x80\x02q\x00.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.",
        b"\x80\x02\x8a\x09123456789.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x02cos\n",
    ] {
        error_of(bytes);
    }
}

#[test]
fn reads_deeply_nested_and_self_referential_lists() {
    // [[[...]]], nested 100,000 times
    let mut deep = b"\x80\x02".to_vec();
    deep.extend(std::iter::repeat_n(b']', 100_000));
    deep.extend(std::iter::repeat_n(b'a', 99_999));
    deep.push(b'.');
    let pickle = Pickle::read(&deep).unwrap();
    assert_eq!(pickle.list(pickle.root()).unwrap().len(), 1);
    // A list that contains itself
    let pickle = Pickle::read(b"\x80\x02]q\x00h\x00a.").unwrap();
    assert_eq!(pickle.list(pickle.root()).unwrap(), [pickle.root()]);
}

#[test]
fn limits_the_number_of_values() {
    let mut many = b"\x80\x02".to_vec();
    many.extend(std::iter::repeat_n(b'N', MAX_VALUES + 1));
    many.push(b'.');
    let error = error_of(&many);
    assert!(error.reason.contains("more than"), "{}", error.reason);
}
