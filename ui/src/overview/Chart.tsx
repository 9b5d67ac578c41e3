import { Box } from "@chakra-ui/react";
import {
  BarController,
  BarElement,
  CategoryScale,
  Chart as ChartJs,
  type ChartData,
  type ChartOptions,
  Legend,
  LinearScale,
  LineController,
  LineElement,
  LogarithmicScale,
  PointElement,
  Tooltip,
} from "chart.js";
import { useEffect, useRef } from "react";

import { formatInZone, viewerZone } from "../time/zone";
import { colourOf, useTheme } from "./theme";

ChartJs.register(
  BarController,
  BarElement,
  CategoryScale,
  Legend,
  LinearScale,
  LineController,
  LineElement,
  LogarithmicScale,
  PointElement,
  Tooltip,
);

export interface Line {
  label: string;
  /** A colour of the theme. */
  colour: string;
  values: (number | null)[];
}

interface Props {
  kind: "bar" | "line";
  /** What the chart shows, for those who do not see it. */
  description: string;
  /** The beginning of each interval. */
  times: string[];
  lines: Line[];
  format?: (value: number) => string;
  /** For values from milliseconds to days. */
  isLogarithmic?: boolean;
}

export function Chart({ kind, description, times, lines, format = formatNumber, isLogarithmic = false }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const chart = useRef<ChartJs>(null);
  const theme = useTheme();

  useEffect(() => {
    if (canvas.current === null) {
      return;
    }
    chart.current = new ChartJs(canvas.current, { type: kind, data: { datasets: [] } });
    return () => {
      chart.current?.destroy();
      chart.current = null;
    };
  }, [kind, theme]);

  useEffect(() => {
    if (chart.current !== null) {
      const zone = viewerZone();
      const moments = times.map((at) => formatInZone(new Date(at), zone));
      const isLong = Date.parse(times.at(-1) ?? "") - Date.parse(times[0] ?? "") > 2 * 86_400_000;
      chart.current.options = optionsOf(moments, lines, format, isLogarithmic);
      chart.current.data = dataOf(moments, lines, isLong);
      chart.current.update();
    }
  });

  return (
    <Box aria-label={description} height="13rem" position="relative" role="img">
      <canvas ref={canvas} />
    </Box>
  );
}

function formatNumber(value: number): string {
  return value.toLocaleString("en");
}

function isPowerOfTen(value: number): boolean {
  return Number.isInteger(Math.log10(value));
}

function optionsOf(
  moments: string[],
  lines: Line[],
  format: (value: number) => string,
  isLogarithmic: boolean,
): ChartOptions {
  const text = colourOf("fg.muted");
  const y = { border: { display: false }, grid: { color: colourOf("border") } };
  return {
    // Nothing moves, so a viewer's wish for less motion is always met.
    animation: false,
    maintainAspectRatio: false,
    interaction: { mode: "index", intersect: false },
    scales: {
      x: { grid: { display: false }, ticks: { color: text, maxRotation: 0, autoSkipPadding: 16 } },
      y: isLogarithmic
        ? {
            ...y,
            type: "logarithmic",
            suggestedMax: 1000,
            ticks: { color: text, callback: (value) => (isPowerOfTen(Number(value)) ? format(Number(value)) : null) },
          }
        : {
            ...y,
            type: "linear",
            beginAtZero: true,
            ticks: { color: text, maxTicksLimit: 6, precision: 0, callback: (value) => format(Number(value)) },
          },
    },
    plugins: {
      legend: { display: lines.length > 1, labels: { boxHeight: 8, boxWidth: 8, color: text } },
      tooltip: {
        callbacks: {
          title: ([item]) => moments[item?.dataIndex ?? 0],
          label: ({ dataset, parsed }) => `${dataset.label ?? ""}: ${format(parsed.y ?? 0)}`,
        },
      },
    },
  };
}

function dataOf(moments: string[], lines: Line[], isLong: boolean): ChartData {
  return {
    labels: moments.map((moment) => (isLong ? moment.slice(5, 10) : moment.slice(11, 16))),
    datasets: lines.map(({ label, colour, values }) => ({
      label,
      data: values,
      backgroundColor: colourOf(colour),
      hoverBackgroundColor: colourOf(colour),
      borderColor: colourOf(colour),
      borderWidth: 1.5,
      pointRadius: values.filter((value) => value !== null).length < 3 ? 2 : 0,
      pointHitRadius: 8,
      spanGaps: true,
    })),
  };
}
