import { bytesOf, hexDump, prettyJson } from "./bytes";

const preview = (format: "json" | "text" | "base64", content: string) => ({
  format,
  content,
  size: content.length,
  is_truncated: false,
});

test("a hex dump has offset, bytes and printable characters", () => {
  const bytes = new Uint8Array([0, 1, 65, 66, 126, 127, 255, ...Array<number>(10).fill(97)]);
  expect(hexDump(bytes)).toBe(
    [
      "00000000  00 01 41 42 7e 7f ff 61 61 61 61 61 61 61 61 61  ..AB~..aaaaaaaaa",
      "00000010  61                                               a",
    ].join("\n"),
  );
});

test("text is encoded as UTF-8, base64 is decoded", () => {
  expect([...bytesOf(preview("text", "é"))]).toEqual([0xc3, 0xa9]);
  expect([...bytesOf(preview("base64", "AP8="))]).toEqual([0, 255]);
});

test("JSON is indented; the beginning of one is not", () => {
  expect(prettyJson('{"a":[1]}')).toBe('{\n  "a": [\n    1\n  ]\n}');
  expect(prettyJson('{"a":[1')).toBeNull();
});
